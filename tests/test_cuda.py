"""The CUDA backend, as far as it goes without a GPU: what compiles, what the machine code is, the cache on disk."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import foscar
from foscar.cuda import compiler
from foscar.cuda.compiler import CompileError, compile_cubin
from foscar.cuda.config import ARCHITECTURES, DecodeConfig, unsupported
from foscar.layout import HEAD_DIMS

cuda_pathfinder = pytest.importorskip("cuda.pathfinder", reason="the CUDA wheels are not installed")

SPECS = [
    foscar.CacheSpec.token_wise(k_bits, 8, head_dim, v_bits=v_bits)
    for head_dim in HEAD_DIMS
    for k_bits in (2, 4)
    for v_bits in (2, 4)
]


def tool(name: str) -> str:
    path = cuda_pathfinder.find_nvidia_binary_utility(name) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return str(path)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foscar"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 4), (torch.bfloat16, 8), (torch.float16, 4)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_variant_compiles_without_spills(
    spec: foscar.CacheSpec, dtype: torch.dtype, rows: int, arch: str, tmp_path: Path
) -> None:
    config = DecodeConfig.choose(spec, dtype, rows)
    cubin = tmp_path / f"{config.name}.cubin"
    cubin.write_bytes(compile_cubin(config.source(), arch, config.name))
    usage = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    assert registers * config.warps * 32 * config.ctas <= 65536
    assert stack == local == 0
    assert (config.shared_bytes(256) + 1024) * config.ctas <= 227 * 1024
    assert config.stages >= 2


def test_codes_reach_the_tensor_cores(tmp_path: Path) -> None:
    config = DecodeConfig.choose(foscar.CacheSpec.token_wise(2, 8, 128), torch.bfloat16, 4)
    cubin = tmp_path / "decode.cubin"
    cubin.write_bytes(compile_cubin(config.source(), "sm_90a", config.name))
    sass = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    # One page: 4 blocks of 16 tokens, 8 products each for K and for V, and no conversion of a code anywhere.
    assert len(re.findall(r"HMMA\.16816\.F32 ", sass)) == 64
    assert "UBLKCP" in sass
    assert not re.search(r"\bI2F", sass.split("HMMA")[5])


def test_what_kernels_do_not_serve() -> None:
    token_wise = foscar.CacheSpec.token_wise(2, 8, 128)
    hopper = (9, 0)
    assert unsupported(token_wise, torch.bfloat16, hopper) is None
    assert "compute capability" in str(unsupported(token_wise, torch.bfloat16, (8, 0)))
    assert "float32" in str(unsupported(token_wise, torch.float32, hopper))
    windowed = foscar.CacheSpec.token_wise(2, 8, 128, recent_tokens=8)
    assert "exact tokens" in str(unsupported(windowed, torch.bfloat16, hopper))
    grouped = foscar.CacheSpec.token_wise(2, 8, 128, group_size=32)
    assert "groups" in str(unsupported(grouped, torch.bfloat16, hopper))


SOURCE = 'extern "C" __global__ void f(int* x) { *x = 1; }\n'


def test_the_cache_hits_only_what_is_the_same(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cubin(SOURCE, "sm_90a", "f")
    entries = sorted(empty_cache.rglob("*"))
    assert compile_cubin(SOURCE, "sm_90a", "f") == first
    assert sorted(empty_cache.rglob("*")) == entries
    compile_cubin(SOURCE.replace("1", "2"), "sm_90a", "f")
    more = sorted(empty_cache.rglob("*"))
    assert len(more) > len(entries)
    # Another header, another entry.
    folder = empty_cache.parent / "kernels"
    shutil.copytree(compiler.KERNELS, folder)
    (folder / "ptx.cuh").write_text("// changed")
    monkeypatch.setattr(compiler, "KERNELS", folder)
    compiler._stamp.cache_clear()
    compile_cubin(SOURCE, "sm_90a", "f")
    compiler._stamp.cache_clear()
    assert len(sorted(empty_cache.rglob("*"))) > len(more)


def _compile(_: int) -> bytes:
    return compile_cubin(SOURCE, "sm_90a", "f")


def test_many_processes_may_race(empty_cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(_compile, range(8)))) == 1


def test_a_kernel_that_does_not_compile() -> None:
    with pytest.raises(CompileError, match=r"bad for sm_90a: (.|\n)*nonsense"):
        compile_cubin("nonsense;", "sm_90a", "bad")
