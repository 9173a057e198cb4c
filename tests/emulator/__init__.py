"""The kernels on a CPU: their own source, over the PTX layer beside this file, made by a host compiler."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import foscar
from foscar.cuda import append as append_launch
from foscar.cuda import extend as extend_launch
from foscar.cuda.compiler import KERNELS
from foscar.cuda.config import CTA_PART_FLOATS, WARP_PART_FLOATS, AppendConfig, DecodeConfig, ExtendConfig, KernelConfig
from foscar.cuda.decode import launches

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_ENTRY = """
extern "C" void run(const foscar::ARGUMENTS* args, int grid) {
  static_assert(sizeof(foscar::ARGUMENTS) == SIZE);
  emulator::launch(grid, THREADS, foscar::memory, Config::kSharedBytes, [&] { foscar::NAME<Config>(*args); });
}
"""


@functools.cache
def build(source: str, name: str, threads: int, size: int) -> ctypes.CDLL:
    """Compile a variant's source, of kernel `name` whose arguments take `size` bytes, into a library."""
    with tempfile.TemporaryDirectory() as folder:
        for header in [*KERNELS.glob("*.cuh"), *HERE.glob("*.*h")]:  # the second ptx.cuh takes the place of the first
            shutil.copy(header, folder)
        words = {"ARGUMENTS": f"{name.title()}Arguments", "NAME": name, "THREADS": str(threads), "SIZE": str(size)}
        entry = re.sub("|".join(words), lambda match: words[match[0]], _ENTRY)
        (Path(folder) / "kernel.cc").write_text(source.split('extern "C"')[0] + entry)
        options = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared", "-I."]
        options += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # which a GPU insists on, too
        subprocess.run([COMPILER or "g++", *options, "kernel.cc", "-o", "kernel.so"], cwd=folder, check=True)
        return ctypes.CDLL(str(Path(folder) / "kernel.so"))


def launch(config: KernelConfig, arguments: ctypes.Structure, ctas: int, stream: int = 0) -> None:
    """Run so many CTAs of a variant, as `foscar.cuda.launch.Kernel` does."""
    kernel = config.name.partition("_")[0]
    library = build(config.source(), kernel, config.threads, ctypes.sizeof(arguments))
    library.run(ctypes.byref(arguments), ctas)


def decode_attention(config: DecodeConfig, grid: int, *tensors_and_options: object) -> None:
    """Run a variant on `grid` multiprocessors; the other arguments are those of `foscar.cuda.decode.launches`."""
    workspace = torch.full((grid * (CTA_PART_FLOATS + WARP_PART_FLOATS),), -1, dtype=torch.int32)
    for arguments in launches(config, grid, workspace.data_ptr(), *tensors_and_options):  # type: ignore[arg-type]
        launch(config, arguments, grid)
        assert (workspace[: grid * CTA_PART_FLOATS] == -1).all(), "parts of CTAs are absent between launches"


def append(by_warps: bool, spec: foscar.CacheSpec, *tensors: torch.Tensor | bool | None) -> None:
    """Run the append kernel; the other arguments are those of `foscar.cuda.append.launch_arguments`."""
    k, batch = tensors[3], tensors[5].shape[0]  # type: ignore[union-attr]
    arrivals = torch.full((batch,), -1, dtype=torch.int32)
    rotates = (matrix is not None for matrix in tensors[-2:])
    config = AppendConfig(spec, k.dtype, *rotates)  # type: ignore[union-attr]
    arguments, ctas = append_launch.launch_arguments(config, by_warps, arrivals.data_ptr(), *tensors)  # type: ignore[arg-type]
    launch(config, arguments, ctas)
    assert (arrivals == -1).all(), "nobody has arrived between launches"


def extend_attention(config: ExtendConfig, splits: int, *tensors_and_options: object) -> None:
    """Run a variant; the other arguments are those of `foscar.cuda.extend.launch_arguments`."""
    arguments, ctas = extend_launch.launch_arguments(config, splits, *tensors_and_options)  # type: ignore[arg-type]
    launch(config, arguments, ctas)
