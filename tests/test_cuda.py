"""The CUDA backend, as far as it goes without a GPU: what compiles, what the machine code is, the cache on disk."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import quant_specs
from typer.testing import CliRunner

import foscar
from foscar.cli import app
from foscar.cuda import compiler, inspect
from foscar.cuda.compiler import CompileError, compile_cubin
from foscar.cuda.config import (
    ARCHITECTURES,
    CTA_PART_FLOATS,
    WARP_PART_FLOATS,
    AppendConfig,
    DecodeConfig,
    ExtendConfig,
    unsupported,
)
from foscar.layout import HEAD_DIMS

pytest.importorskip("cuda.pathfinder", reason="the CUDA wheels are not installed")

SPEC = foscar.CacheSpec.token_wise(2, 8, 128)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foscar"


def expected_products(config: DecodeConfig) -> dict[str, int]:
    """Matrix instructions of a page."""
    k, v, head_dim = config.spec.k, config.spec.v, config.spec.head_dim
    runs, channel_wise = head_dim // 32, k.axis == "channel"
    group = runs if channel_wise else (k.group_size or head_dim) // 32
    counts = {"HMMA.16816.F32": 4 * head_dim // 16}
    if v.axis == "channel":  # sums of p
        counts["HMMA.16816.F32"] += 4 * (8 // v.bits // 2)
    if is_plain(k, head_dim):  # integers of two digits, which halves share; an odd run of 2 bits takes as much as two
        steps = -(-runs * k.bits // 4) * (8 // k.bits) // 2
        return counts | {"IMMA.16832.U8.S8": 4 * steps * (1 if config.halves else 2)}
    # Of K with 2 bits, a large one takes two runs, a small one a run that is alone.
    kind, parts = (".BF16", 2) if channel_wise else ("", 1)
    large, small = "HMMA.16816.F32" + kind, "HMMA.1688.F32" + kind
    per_slice = 2 * runs if k.bits == 4 else 4 * (runs // group) * (group // 2)
    counts[large] = counts.get(large, 0) + 4 * parts * per_slice
    counts[small] = 0 if k.bits == 4 else 4 * parts * 4 * (runs // group) * (group % 2)
    if channel_wise:  # q times offset, in each pass; a float16 is the sum of two bfloat16
        counts[small] += 4 * runs * (1 if config.dtype == torch.bfloat16 else 2) * (1 if config.halves else 2)
    return {name: count for name, count in counts.items() if count}


def is_plain(quant: foscar.QuantSpec, head_dim: int) -> bool:
    return quant.axis == "token" and quant.group_size == head_dim


def most_alu(config: DecodeConfig) -> float:
    """What an element of K or V may take of the pipes that products do not use."""
    k, v, head_dim = config.spec.k, config.spec.v, config.spec.head_dim
    if not (is_plain(k, head_dim) and is_plain(v, head_dim)):
        return 0.85 if k.axis == "channel" else 0.7  # folding scales and offsets for each page
    if not config.halves:
        return 0.6 if k.bits == v.bits == 2 else 0.7
    # What softmax takes is spread over fewer channels; of 96 channels in 2 bits, a lane's last word is used by half.
    return 0.6 if k.bits == 4 or v.bits == 4 else 0.45 if head_dim >= 128 else 0.5


def most_spilled(config: DecodeConfig) -> int:
    """Bytes of a thread: with eight groups of V, other keys than plain ones take more registers than there are."""
    k, v = config.spec.k, config.spec.v
    eight_groups = config.spec.head_dim == 256 and v == foscar.QuantSpec(v.bits, "token", 32)
    return 56 if eight_groups and (k.axis == "channel" or k.group_size == 32) else 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("config", list(inspect.sample_variants()), ids=lambda config: config.name)
def test_what_the_compiler_makes_of_each_variant(config: DecodeConfig, arch: str) -> None:
    try:
        report = inspect.inspect(config, arch)
    except inspect.ToolMissingError as error:
        pytest.skip(str(error))
    assert report.registers * config.warps * 32 <= 65536
    assert report.spill_bytes <= most_spilled(config)
    assert config.shared_bytes + 1024 <= 228 * 1024
    # As many products as a page has operands, and no conversion beyond a mask or a shift of a word's fields.
    assert report.opcodes == expected_products(config)
    assert report.alu_per_element <= most_alu(config)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_append_variants_have_room_for_many_ctas(dtype: torch.dtype, arch: str) -> None:
    for head_dim in HEAD_DIMS:
        quants = quant_specs(head_dim)
        for i, (k, v) in enumerate(zip(quants, quants[1:] + quants[:1], strict=True)):
            k = replace(k, hadamard=i % 3 == 1)
            rotates = (i % 3 > 0, i % 3 == 1)
            config = AppendConfig(foscar.CacheSpec(k, v, 8, head_dim, sink_tokens=i % 2), dtype, *rotates)
            try:
                registers, stack, sass = inspect.disassemble(config, arch)
            except inspect.ToolMissingError as error:
                pytest.skip(str(error))
            assert stack == 0 and registers * config.threads * config.ctas <= 65536
            assert ("HMMA" in sass) == (any(rotates) and dtype != torch.float32)
            assert "FRND" not in sass  # a conversion is four times slower than the additions that round


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_variants_that_extend_multiply_on_tensor_cores(head_dim: int, arch: str) -> None:
    quants = quant_specs(head_dim)
    for i, (k, v) in enumerate(zip(quants[::2], quants[1::2] + quants[:1], strict=False)):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        config = ExtendConfig.choose(
            foscar.CacheSpec(k, v, 8, head_dim, sink_tokens=i % 2), dtype, (16, 1000)[i // 2 % 2]
        )
        try:
            registers, stack, sass = inspect.disassemble(config, arch)
        except inspect.ToolMissingError as error:
            pytest.skip(str(error))
        assert registers * config.threads * config.ctas <= 65536
        assert stack <= 128  # of what is not used in each product
        assert config.ctas * (config.shared_bytes + 1024) <= 228 * 1024
        # 16 x 8 x 16 each, of 64 keys.
        assert sass.count("HMMA.16816") == 2 * config.row_tiles * 8 * head_dim // 16
        assert ("HMMA.16816.F32.BF16" in sass) == (dtype == torch.bfloat16)


def test_16_bit_variants_differ_in_their_type_alone() -> None:
    spec = foscar.CacheSpec.token_wise(2, 8, 128)
    sources = [DecodeConfig.choose(spec, dtype, 4).source() for dtype in (torch.bfloat16, torch.float16)]
    assert sources[0].replace("__nv_bfloat16", "__half").replace("kBf16 = true", "kBf16 = false") == sources[1]
    for source in sources:
        assert compile_cubin(source, "sm_90a", "decode")


@pytest.mark.parametrize("config", list(inspect.shipped_variants()), ids=lambda config: config.name)
def test_the_workspace_has_room_for_each_variant(config: DecodeConfig) -> None:
    part = config.spec.head_dim * 4 * (1 if config.halves else 2)  # float32 numbers
    assert 2 * 2 * part <= CTA_PART_FLOATS and config.warps * part <= WARP_PART_FLOATS


def test_rows_choose_the_variant() -> None:
    spec = foscar.CacheSpec.token_wise(2, 8, 128)
    assert [DecodeConfig.choose(spec, torch.float16, rows).halves for rows in (1, 4, 5, 8)] == [
        True,
        True,
        False,
        False,
    ]


def test_kernels_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "sample_variants", lambda: [DecodeConfig.choose(SPEC, torch.bfloat16, 4)])
    output = tmp_path / "kernels.json"
    result = CliRunner().invoke(app, ["kernels", "--json", str(output)], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0 and "decode_k2t128_v2t128_d128_r4_bf16" in result.stdout
    (report,) = json.loads(output.read_text())
    assert {"name", "arch", "k", "v", "head_dim", "registers", "spill_bytes", "shared_bytes"} <= set(report)
    assert report["alu_per_element"] < 0.6 and "IMMA.16832.U8.S8" in report["opcodes"]
    bad = CliRunner().invoke(app, ["kernels", "--arch", "sm_80"], env={"COLUMNS": "200"})
    assert bad.exit_code == 1 and "decode_k2t128_v2t128_d128_r4_bf16 for sm_80" in bad.stdout
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = CliRunner().invoke(app, ["kernels"], env={"COLUMNS": "200"})
    assert missing.exit_code == 1 and "cuobjdump is not installed" in missing.stdout


def test_what_kernels_do_not_serve() -> None:
    token_wise = foscar.CacheSpec.token_wise(2, 8, 128)
    hopper = (9, 0)
    assert unsupported(token_wise, torch.bfloat16, hopper) is None
    assert "compute capability" in str(unsupported(token_wise, torch.bfloat16, (8, 0)))
    assert "float32" in str(unsupported(token_wise, torch.float32, hopper))
    for spec in (
        foscar.CacheSpec.token_wise(2, 8, 128, group_size=32),
        foscar.CacheSpec.token_wise(4, 8, 256, sink_tokens=5, recent_tokens=20),
        foscar.CacheSpec.kivi(2, 8, 128, sink_tokens=64, recent_tokens=128),
    ):
        assert unsupported(spec, torch.float16, hopper) is None
    assert "registers" in str(unsupported(foscar.CacheSpec.kivi(2, 8, 256), torch.float16, hopper))


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


def test_threads_may_race_for_the_first_import(empty_cache: Path) -> None:
    """In a process of its own: here it has been imported."""
    program = f"""
from concurrent.futures import ThreadPoolExecutor
from foscar.cuda.compiler import compile_cubin, cuda_core

def first_call(i):
    if i % 2:
        assert cuda_core().ObjectCode
    return compile_cubin({SOURCE!r}, "sm_90a", "f")

with ThreadPoolExecutor(8) as pool:
    assert len(set(pool.map(first_call, range(8)))) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_kernel_that_does_not_compile() -> None:
    with pytest.raises(CompileError, match=r"bad for sm_90a: (.|\n)*nonsense"):
        compile_cubin("nonsense;", "sm_90a", "bad")
