"""Kernels' own source on a CPU, thread by thread: schedules, merges, masks and every operand, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import emulator
import pytest
import torch
from helpers import make_batch, oracle, relative_error
from test_attention import HARD_INPUTS, HARD_SPECS, hard_inputs

import foscar
from foscar.cuda.config import DecodeConfig

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 3e-3}
T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi
CHANNEL = foscar.QuantSpec(2, "channel")


def check(
    spec: foscar.CacheSpec,
    lengths: list[int],
    group: int,
    *,
    kv: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None,
    q_factor: float = 1.0,
    q_len: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    grid: int = 3,
    warps: int = 3,
    small: bool = False,
    softcap: float | None = None,
    window: int | None = None,
    with_sinks: bool = False,
) -> None:
    torch.manual_seed(len(lengths))
    batch = make_batch(spec, lengths, dtype=dtype, kv=kv)
    q = (torch.randn(len(lengths), q_len, spec.num_kv_heads * group, spec.head_dim) * q_factor).to(dtype)
    sinks = torch.randn(q.shape[2]) if with_sinks else None
    config = replace(DecodeConfig.choose(spec, dtype, min(q_len * group, 8), small), warps=warps)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    cache = batch.cache
    tensors = (q, cache.pages, cache.exact, cache.lengths, batch.block_table, batch.seq_lens, batch.seq_ids, sinks)
    emulator.decode_attention(config, grid, *tensors, out, lse, spec.head_dim**-0.5, softcap, window)
    for b, (k, v) in enumerate(batch.dequantized()):
        want, want_lse = oracle(q[b], k, v, softcap=softcap, window=window, sinks=sinks)
        empty = want_lse == -torch.inf
        assert torch.equal(lse[b] == -torch.inf, empty) and (out[b][empty] == 0).all()
        assert relative_error(out[b], want) <= BOUNDS[dtype]
        assert torch.allclose(lse[b][~empty].double(), want_lse[~empty], rtol=1e-5, atol=1e-3)


RAGGED = [1, 0, 63, 64, 65, 300, 0, 700]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [4, 7])
def test_ragged_batch(bits: int, group: int) -> None:
    check(T(bits, 2, 128, v_bits=6 - bits), RAGGED, group)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("grid", "warps"), [(1, 1), (1, 16), (2, 5), (7, 2), (5, 3)])
def test_schedules(grid: int, warps: int, small: bool) -> None:
    """Runs that begin and end anywhere: within a warp, a CTA, across several CTAs."""
    for lengths in ([2000], [640] * 3, RAGGED, [3] * 40, [0, 0], [1500, 10, 10]):
        check(T(2, 2, 64), lengths, 2, grid=grid, warps=warps, small=small)


def test_a_sequence_of_many_ctas() -> None:
    """More than a last one merges by itself."""
    spec = T(2, 1, 64, recent_tokens=3500)  # units of 8 tokens: many CTAs' worth, and soon emulated
    for lengths, grid in (([3500], 21), ([3500], 45), ([2900, 700, 1300], 60), ([2900, 3500], 131)):
        check(spec, lengths, 4, grid=grid, warps=2)


def test_scores_that_rise() -> None:
    """Maxima are raised again and again, and partial results of many warps and CTAs differ in theirs."""
    k = torch.randn(3000, 1, 64) * torch.linspace(0.1, 4, 3000)[:, None, None]
    v = torch.randn(3000, 1, 64) * torch.logspace(-3, 3, 3000)[:, None, None]
    for grid, warps in ((1, 2), (2, 12), (12, 2)):
        check(T(2, 1, 64), [3000], 4, kv=([k], [v]), q_factor=4, grid=grid, warps=warps)
    check(K(4, 1, 64), [3000], 4, kv=([k.bfloat16()], [v.bfloat16()]), q_factor=4, grid=12, warps=2)


@pytest.mark.parametrize("spec", [T(2, 1, 64), T(2, 1, 64, group_size=32), K(4, 1, 64)], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_not_finite_spoils_its_own_row(spec: foscar.CacheSpec, bad: float) -> None:
    batch = make_batch(spec, [640], dtype=torch.bfloat16)
    q = torch.randn(1, 1, 4, 64).bfloat16()
    q[0, 0, 2, 7] = bad
    config = replace(DecodeConfig.choose(spec, q.dtype, 4), warps=2)
    out, lse = torch.zeros_like(q), torch.zeros(1, 1, 4)
    cache = batch.cache
    tensors = (q, cache.pages, cache.exact, cache.lengths, batch.block_table, batch.seq_lens, batch.seq_ids, None)
    emulator.decode_attention(config, 3, *tensors, out, lse, 0.125, None, None)
    assert out[0, 0, 2].isnan().all() and lse[0, 0, 2].isnan()
    rest = [0, 1, 3]
    want, _ = oracle(q[0][:, rest], *(x.repeat(1, 3, 1) for x in batch.dequantized()[0]))
    assert relative_error(out[0][:, rest], want) <= BOUNDS[q.dtype]


@pytest.mark.parametrize("spec", HARD_SPECS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_hard_inputs(spec: foscar.CacheSpec, dtype: torch.dtype) -> None:
    errors = {}
    for name in HARD_INPUTS:
        torch.manual_seed(0)
        q, k, v = (x[:960] for x in hard_inputs(name, spec.k.axis))  # whole blocks: nothing exact
        batch = make_batch(spec, [len(k)], dtype=torch.float32, kv=([k], [v]))
        cache = batch.cache
        q = q.to(dtype)[None]
        out, lse = torch.full_like(q, torch.nan), torch.zeros(1, 1, 8)
        config = replace(DecodeConfig.choose(spec, dtype, 8), warps=4)
        exact = cache.exact.to(dtype)
        tensors = (q, cache.pages, exact, cache.lengths, batch.block_table, batch.seq_lens, batch.seq_ids, None)
        emulator.decode_attention(config, 3, *tensors, out, lse, 128**-0.5, None, None)
        errors[name] = relative_error(out[0], oracle(q[0], *batch.dequantized()[0])[0])
    assert max(errors.values()) <= BOUNDS[dtype], errors


def test_caps_of_any_size() -> None:
    for cap in (0.1, 30.0, 1e4, 1e9):
        check(T(4, 1, 64), [200], 2, softcap=cap, q_factor=3)


def test_many_sequences() -> None:
    check(T(2, 1, 64), [i * 37 % 131 for i in range(70)], 3, grid=4, warps=4)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_windows_and_masks(dtype: torch.dtype) -> None:
    spec = T(2, 1, 128, sink_tokens=5, recent_tokens=20)
    check(spec, RAGGED, 4, dtype=dtype)
    check(spec, RAGGED, 2, q_len=2, dtype=dtype, window=100, softcap=5.0, with_sinks=True)
    check(T(4, 1, 64, sink_tokens=64, recent_tokens=128), [40, 64, 65, 200, 1000], 5, dtype=dtype, window=700)


@pytest.mark.parametrize(
    "spec",
    [
        K(2, 1, 128, recent_tokens=30),
        foscar.CacheSpec(CHANNEL, foscar.QuantSpec(4, "channel"), 1, 64),
        T(2, 1, 128, group_size=32),
        T(4, 1, 128, group_size=64),
        T(2, 1, 96),
        T(4, 1, 256, v_bits=2),
    ],
    ids=str,
)
def test_schemes(spec: foscar.CacheSpec) -> None:
    check(spec, [1, 64, 130, 333], 4)
    check(spec, [1, 64, 130, 333], 8, dtype=torch.float16 if spec.head_dim < 256 else torch.bfloat16)
