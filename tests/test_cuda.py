"""The CUDA backend, as far as it goes without a GPU: what compiles, what the machine code is, the cache on disk."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foscar
from foscar.cli import app
from foscar.cuda import compiler, inspect
from foscar.cuda.compiler import CompileError, compile_cubin
from foscar.cuda.config import ARCHITECTURES, MAX_TILES, SM_PART_FLOATS, DecodeConfig, unsupported
from foscar.layout import PAGE_SIZE

pytest.importorskip("cuda.pathfinder", reason="the CUDA wheels are not installed")

SPEC = foscar.CacheSpec.token_wise(2, 8, 128)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foscar"


def expected_products(config: DecodeConfig) -> dict[str, int]:
    """Matrix instructions of a page. Of K with 2 bits, a large one takes two runs, a small one a run that is alone."""
    k, v, head_dim = config.spec.k, config.spec.v, config.spec.head_dim
    runs, channel_wise = head_dim // 32, k.axis == "channel"
    group = runs if channel_wise else (k.group_size or head_dim) // 32
    counts = dict.fromkeys(("HMMA.16816.F32", "HMMA.16816.F32.BF16", "HMMA.1688.F32", "HMMA.1688.F32.BF16"), 0)
    kind = ".BF16" if channel_wise else ""
    parts = 2 if channel_wise else 1
    counts["HMMA.16816.F32" + kind] = 4 * parts * (2 * runs if k.bits == 4 else 4 * (runs // group) * (group // 2))
    counts["HMMA.1688.F32" + kind] = 0 if k.bits == 4 else 4 * parts * 4 * (runs // group) * (group % 2)
    if channel_wise:  # q times offset; a float16 is the sum of two bfloat16
        counts["HMMA.1688.F32.BF16"] += 4 * runs * (1 if config.dtype == torch.bfloat16 else 2)
    counts["HMMA.16816.F32"] += 4 * head_dim // 16
    if v.axis == "channel":  # sums of p
        counts["HMMA.16816.F32"] += 4 * (8 // v.bits // 2)
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("config", list(inspect.sample_variants()), ids=lambda config: config.name)
def test_what_the_compiler_makes_of_each_variant(config: DecodeConfig, arch: str) -> None:
    try:
        report = inspect.inspect(config, arch)
    except inspect.ToolMissingError as error:
        pytest.skip(str(error))
    assert report.registers * config.warps * 32 <= 65536
    assert report.spill_bytes == 0
    assert config.shared_bytes + 1024 <= 228 * 1024
    assert config.stages >= 2
    # Only 16-bit products, as many as a page has operands, and no conversion beyond a mask or half a shift of a pair.
    assert report.opcodes == expected_products(config)
    folding = 2 * 8 / (4 * PAGE_SIZE) if config.spec.k.axis == "channel" else 0  # of scales and offsets, for a page
    assert report.alu_per_element <= 0.7 + folding


def test_16_bit_variants_differ_in_their_type_alone() -> None:
    spec = foscar.CacheSpec.token_wise(2, 8, 128)
    sources = [DecodeConfig.choose(spec, dtype, 4).source() for dtype in (torch.bfloat16, torch.float16)]
    assert sources[0].replace("__nv_bfloat16", "__half") == sources[1]
    for source in sources:
        assert compile_cubin(source, "sm_90a", "decode")


@pytest.mark.parametrize("config", list(inspect.shipped_variants()), ids=lambda config: config.name)
def test_the_workspace_has_room_for_each_variant(config: DecodeConfig) -> None:
    cta_floats = 2 * 2 * config.part_floats
    assert config.warps * config.part_floats + cta_floats <= SM_PART_FLOATS
    assert config.tiles <= MAX_TILES


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
    assert report["alu_per_element"] < 0.6 and report["opcodes"] == {"HMMA.16816.F32": 64}
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
    grouped = foscar.CacheSpec.token_wise(2, 8, 128, group_size=32)
    assert unsupported(grouped, torch.bfloat16, hopper) is None


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
