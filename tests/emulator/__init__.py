"""The decode kernel on a CPU: its own source, over the PTX layer beside this file, made by a host compiler."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from foscar.cuda.compiler import KERNELS
from foscar.cuda.config import CTA_PART_FLOATS, WARP_PART_FLOATS, DecodeConfig
from foscar.cuda.decode import launches

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_ENTRY = """
extern "C" void run(const foscar::DecodeArguments* args, int grid) {
  static_assert(sizeof(foscar::DecodeArguments) == SIZE);
  emulator::launch(grid, Config::kWarps * 32, foscar::memory, Config::kSharedBytes,
                   [&] { foscar::decode<Config>(*args); });
}
"""


@functools.cache
def build(source: str, size: int) -> ctypes.CDLL:
    """Compile a variant's source, whose arguments take `size` bytes, into a library."""
    with tempfile.TemporaryDirectory() as folder:
        for header in [*KERNELS.glob("*.cuh"), *HERE.glob("*.*h")]:  # the second ptx.cuh takes the place of the first
            shutil.copy(header, folder)
        entry = _ENTRY.replace("SIZE", str(size))
        (Path(folder) / "kernel.cc").write_text(source.split('extern "C"')[0] + entry)
        options = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared", "-I."]
        options += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # which a GPU insists on, too
        subprocess.run([COMPILER or "g++", *options, "kernel.cc", "-o", "kernel.so"], cwd=folder, check=True)
        return ctypes.CDLL(str(Path(folder) / "kernel.so"))


def decode_attention(config: DecodeConfig, grid: int, *tensors_and_options: object) -> None:
    """Run a variant on `grid` multiprocessors; the other arguments are those of `foscar.cuda.decode.launches`."""
    workspace = torch.full((grid * (CTA_PART_FLOATS + WARP_PART_FLOATS),), -1, dtype=torch.int32)
    for arguments in launches(config, grid, workspace.data_ptr(), *tensors_and_options):  # type: ignore[arg-type]
        library = build(config.source(), ctypes.sizeof(arguments))
        library.run(ctypes.byref(arguments), grid)
        assert (workspace[: grid * CTA_PART_FLOATS] == -1).all(), "parts of CTAs are absent between launches"
