from __future__ import annotations

import math

import pytest
import torch
from helpers import Batch, all_specs, i32, make_batch, oracle, relative_error

import foscar
from foscar.layout import HEAD_DIMS
from foscar.ops import backend

# Relative error of the output against float64 attention over the dequantised cache. float32's covers scores of about
# 100, each known to a few units of 100 * 2**-24, on any device and in any order of summation.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 3e-3}


def check(batch: Batch, q: torch.Tensor, bound: float, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend, with a poisoned output, and compare every row with the oracle; return what was computed."""
    out = torch.full_like(q, torch.nan)
    got, lse = foscar.decode_attention(q, batch.cache, **batch.tables, out=out, return_lse=True, **options)
    assert got is out
    tokens, lse = (q, lse) if q.dim() == 4 else (q[:, None], lse[:, None])
    got = got if q.dim() == 4 else got[:, None]
    # Kernels may multiply a query as integers, within 2**-14 of the largest value.
    rtol, atol = (1e-4, 3e-3) if backend(batch.cache.spec, q.dtype, q.device)[0] == "cuda" else (1e-5, 2e-5)
    assert lse.dtype == torch.float32 and lse.shape == tokens.shape[:-1]
    for b, (k, v) in enumerate(batch.dequantized()):
        want_out, want_lse = oracle(tokens[b], k, v, **options)  # type: ignore[arg-type]
        assert relative_error(got[b], want_out) <= bound
        empty = want_lse == -torch.inf
        assert torch.equal(lse[b] == -torch.inf, empty)
        assert (got[b][empty] == 0).all()
        assert torch.allclose(lse[b][~empty].double(), want_lse[~empty], rtol=rtol, atol=atol)
    return out, lse


@pytest.mark.parametrize("spec", all_specs(2), ids=str)
def test_every_scheme_and_gqa_ratio(spec: foscar.CacheSpec, device: torch.device) -> None:
    batch = make_batch(spec, [130, 64], device)
    for ratio in (1, 3, 4, 5, 7, 8, 16):
        check(batch, torch.randn(2, 2 * ratio, spec.head_dim, device=device), 2e-5)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("windows", [(0, 0), (64, 128), (4, 33)], ids=str)
def test_every_length(head_dim: int, dtype: torch.dtype, windows: tuple[int, int], device: torch.device) -> None:
    lengths = [0, 1, 2, 3, 4, 5, 63, 64, 65, 0, 127, 128, 129, 192, 193, 260, 700, 0]
    for make in (foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi):
        spec = make(4, 2, head_dim, v_bits=2, sink_tokens=windows[0], recent_tokens=windows[1])
        batch = make_batch(spec, lengths, device, dtype)
        q = torch.randn(len(lengths), 6, head_dim, device=device).to(dtype)
        check(batch, q, BOUNDS[dtype])


@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("windows", [(0, 0), (70, 40)], ids=str)
@pytest.mark.parametrize("options", range(6))
def test_options(q_len: int, windows: tuple[int, int], options: int, device: torch.device) -> None:
    torch.manual_seed(options)
    sinks = torch.randn(8, device=device) * 3
    chosen: dict[str, object] = [
        {},
        {"softcap": 5.0, "sinks": sinks},
        {"window": 100, "sm_scale": 0.3},
        {"window": 0},
        {"softcap": 2.0, "window": 37, "sinks": sinks, "sm_scale": 1.0},
        {"sinks": sinks.bfloat16()},
    ][options]
    lengths = [0, 1, 3, 64, 65, 128, 200, 391]
    for spec in (
        foscar.CacheSpec.token_wise(2, 2, 64, group_size=32, sink_tokens=windows[0], recent_tokens=windows[1]),
        foscar.CacheSpec.kivi(4, 2, 64, sink_tokens=windows[0], recent_tokens=windows[1]),
    ):
        batch = make_batch(spec, lengths, device)
        check(batch, torch.randn(len(lengths), q_len, 8, 64, device=device), BOUNDS[torch.float32], **chosen)


@pytest.mark.parametrize("q_len", [1, 3])
def test_options_that_switch_nothing_on(q_len: int, device: torch.device) -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(4, 2, 64), [200, 3, 0], device)
    q = torch.randn(3, q_len, 4, 64, device=device)
    want = foscar.decode_attention(q, batch.cache, **batch.tables)
    for options in (
        {"softcap": 0.0},
        {"window": -1},
        {"window": 200},
        {"sinks": torch.full((4,), -torch.inf, device=device)},
    ):
        assert torch.equal(foscar.decode_attention(q, batch.cache, **batch.tables, **options), want)


def test_pages_before_a_sliding_window_are_not_looked_at(device: torch.device) -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(4, 2, 64), [400, 300], device)
    q = torch.randn(2, 2, 4, 64, device=device)
    want = foscar.decode_attention(q, batch.cache, **batch.tables, window=100)
    batch.block_table[0, : (400 - 2 - 100) // 64] = -1
    batch.block_table[1, : (300 - 2 - 100) // 64] = 2**31 - 1
    assert torch.equal(foscar.decode_attention(q, batch.cache, **batch.tables, window=100), want)


def test_coarse_products_elsewhere_do_not_matter() -> None:
    batch = make_batch(foscar.CacheSpec.kivi(4, 2, 64, recent_tokens=64), [200])
    q = torch.randn(1, 4, 64)
    want = foscar.decode_attention(q, batch.cache, **batch.tables)
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(foscar.decode_attention(q, batch.cache, **batch.tables), want)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(chosen)


def test_one_query_token_needs_no_dimension() -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(2, 2, 64), [100, 3])
    q = torch.randn(2, 4, 64)
    flat, flat_lse = foscar.decode_attention(q, batch.cache, **batch.tables, return_lse=True)
    full, full_lse = foscar.decode_attention(q[:, None], batch.cache, **batch.tables, return_lse=True)
    assert torch.equal(flat, full[:, 0]) and torch.equal(flat_lse, full_lse[:, 0])
    assert torch.equal(foscar.decode_attention(q, batch.cache, **batch.tables), flat)


def test_speculated_tokens_see_what_single_tokens_see() -> None:
    batch = make_batch(foscar.CacheSpec.kivi(2, 2, 64, recent_tokens=32), [150, 90])
    q = torch.randn(2, 4, 6, 64)
    together = foscar.decode_attention(q, batch.cache, **batch.tables)
    for t in range(4):
        lens = batch.seq_lens - 3 + t
        alone = foscar.decode_attention(q[:, t], batch.cache, batch.block_table, lens, seq_ids=batch.seq_ids)
        assert torch.allclose(alone, together[:, t], atol=1e-5)


def test_strided_inputs_and_outputs() -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(4, 2, 64), [100, 70])
    q = torch.randn(64, 2, 3, 6).permute(1, 2, 3, 0)
    want = foscar.decode_attention(q.contiguous(), batch.cache, **batch.tables)
    out = torch.full((2, 6, 3, 128), torch.nan)
    view = out.transpose(1, 2)[..., ::2]
    assert torch.allclose(foscar.decode_attention(q, batch.cache, **batch.tables, out=view), want, atol=1e-6)
    assert out[..., 1::2].isnan().all()
    sinks = torch.randn(12)[::2]
    tables = {
        "block_table": batch.block_table.repeat_interleave(2, 1)[:, ::2],
        "seq_lens": batch.seq_lens.repeat_interleave(2)[::2],
    }
    got = foscar.decode_attention(q, batch.cache, **tables, sinks=sinks)
    assert torch.allclose(got, foscar.decode_attention(q, batch.cache, **batch.tables, sinks=sinks.clone()), atol=1e-6)


def test_batch_rows_do_not_depend_on_each_other() -> None:
    batch = make_batch(foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=4, recent_tokens=20), [0, 500, 1, 64, 333])
    q = torch.randn(5, 2, 6, 64)
    together = foscar.decode_attention(q, batch.cache, **batch.tables)
    for b in range(5):
        row = {name: tensor[b : b + 1] for name, tensor in batch.tables.items()}
        assert torch.equal(foscar.decode_attention(q[b : b + 1], batch.cache, **row)[0], together[b])


# Accuracy on hard inputs, in the dtypes that models use.

HARD_SPECS = [
    foscar.CacheSpec.token_wise(2, 1, 128),
    foscar.CacheSpec.token_wise(4, 1, 128, group_size=32),
    foscar.CacheSpec.kivi(2, 1, 128),
    foscar.CacheSpec(foscar.QuantSpec(4), foscar.QuantSpec(2, "channel"), 1, 128),
]

HARD_INPUTS = [
    "random",
    "one dominating token",
    "v scales from 1e-4 to 1e3",
    "v offsets 1000 times the range",
    "k offsets 1000 times the range",
    "k channels 100 times the others",
    "k scales from 1e-6 to 1e6",
    "only a low-scale channel differs",
]


def hard_inputs(name: str, k_axis: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    length = 1000
    q, k, v = torch.randn(1, 8, 128), torch.randn(length, 1, 128), torch.randn(length, 1, 128)
    if name == "one dominating token":
        k[length // 3] = q[0, 0] * 3
    elif name == "v scales from 1e-4 to 1e3":
        v *= torch.logspace(-4, 3, length)[:, None, None]
    elif name == "v offsets 1000 times the range":
        v = v / 6 + 1000
    elif name == "k offsets 1000 times the range":
        k = k / 100 + 10
    elif name == "k channels 100 times the others":
        k[:, :, 5] *= 100
        q[:, :, 5] /= 100
    elif name == "k scales from 1e-6 to 1e6":
        if k_axis == "channel":
            factor = torch.logspace(-6, 6, 128)
            k, q = k * factor, (q / factor).clamp(-6e4, 6e4)
        else:
            k *= torch.logspace(-6, 6, length)[:, None, None]
    elif name == "only a low-scale channel differs":
        k[:] = 1e6
        k[:, :, 3] = torch.randn(length, 1) * 1e-3
        q[:] = 0
        q[:, :, 3] = 1e3
    return q, k, v


@pytest.mark.parametrize("spec", HARD_SPECS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", HARD_INPUTS)
def test_hard_inputs(name: str, dtype: torch.dtype, spec: foscar.CacheSpec, device: torch.device) -> None:
    q, k, v = (x.to(device) for x in hard_inputs(name, spec.k.axis))
    # Values beyond float16 are stored, too: the cache takes what the model gives, here float32.
    batch = make_batch(spec, [len(k)], device, torch.float32, ([k], [v]))
    check(batch, q.to(dtype), BOUNDS[dtype])


@pytest.mark.parametrize("spec", HARD_SPECS, ids=str)
def test_large_offsets_of_v_do_not_drown_what_attention_does(spec: foscar.CacheSpec, device: torch.device) -> None:
    """Relative to an output of 1000 any weights look right; relative to its distance from the mean of V they do not."""
    q, k, v = (x.to(device) for x in hard_inputs("v offsets 1000 times the range", spec.k.axis))
    batch = make_batch(spec, [len(k)], device, torch.float32, ([k], [v]))
    out = foscar.decode_attention(q, batch.cache, **batch.tables)
    k_hat, v_hat = batch.dequantized()[0]
    want, _ = oracle(q, k_hat, v_hat)
    mean = v_hat.double().mean(0)
    assert (want - mean).abs().max() > 1e-3
    # float32 holds values near 1000 to 6e-5.
    assert ((out - want).abs() <= 2e-3 * (want - mean).abs() + 4e-4).all()


def test_flat_attention_over_128k_tokens(device: torch.device) -> None:
    length = 131_072
    for spec in (foscar.CacheSpec.token_wise(2, 1, 64), foscar.CacheSpec.kivi(4, 1, 64)):
        k = torch.randn(length, 1, 64, device=device) * 1e-3
        v = torch.randn(length, 1, 64, device=device) + 1
        batch = make_batch(spec, [length], device, torch.float32, ([k], [v]))
        check(batch, torch.randn(1, 2, 64, device=device).half(), 1e-3)


@pytest.mark.parametrize("spec", HARD_SPECS, ids=str)
def test_very_large_and_very_negative_scores(spec: foscar.CacheSpec) -> None:
    k = torch.randn(200, 1, 128) * 0.01 - 10
    batch = make_batch(spec, [200], kv=([k], [torch.randn(200, 1, 128)]))
    for factor in (80.0, -80.0):
        q = torch.full((1, 2, 128), factor)
        out, lse = foscar.decode_attention(q, batch.cache, **batch.tables, sm_scale=1.0, return_lse=True)
        want, want_lse = oracle(q, *batch.dequantized()[0], sm_scale=1.0)
        assert lse.abs().min() > 9e4
        # Scores of 1e5 are known to about 0.01 in float32, whatever the kernel.
        assert torch.allclose(lse.double(), want_lse, rtol=1e-6)
        assert relative_error(out, want) < 0.05
        # The cap saturates instead of overflowing: all tokens weigh the same.
        out, lse = foscar.decode_attention(q, batch.cache, **batch.tables, softcap=30.0, return_lse=True)
        assert torch.allclose(lse, torch.tensor(math.copysign(30, -factor) + math.log(200)), atol=1e-3)
        assert relative_error(out, batch.dequantized()[0][1].mean(0).expand(1, 2, -1)) < 1e-4


def test_nan_in_a_query_is_not_hidden() -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(4, 1, 64), [100])
    q = torch.randn(1, 2, 64)
    q[0, 1, 3] = torch.nan
    out = foscar.decode_attention(q, batch.cache, **batch.tables)
    assert torch.isfinite(out[0, 0]).all() and out[0, 1].isnan().all()


def test_sinks_count_once_and_unscaled() -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(4, 1, 64), [5000, 0])
    q = torch.zeros(2, 2, 64)
    sinks = torch.tensor([math.log(5000.0), -torch.inf])
    out, lse = foscar.decode_attention(q, batch.cache, **batch.tables, sinks=sinks, sm_scale=0.01, return_lse=True)
    mean = batch.dequantized()[0][1].mean(0)[0]
    assert torch.allclose(out[0, 0], mean / 2, atol=1e-5)
    assert torch.allclose(out[0, 1], mean, atol=1e-5)
    assert torch.allclose(lse[0], torch.tensor([10_000.0, 5000.0]).log(), atol=1e-5)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_tiers_merge_like_one_cache() -> None:
    """Attention over a prefix and over the rest, merged, is attention over both: prefix sharing by LSE."""
    spec = foscar.CacheSpec.token_wise(4, 2, 64)
    k, v = torch.randn(200, 2, 64), torch.randn(200, 2, 64)
    q = torch.randn(1, 4, 64)
    whole = make_batch(spec, [200], kv=([k], [v]))
    parts = [make_batch(spec, [len(s)], kv=([k[s]], [v[s]])) for s in torch.arange(200).split([130, 70])]
    states = [foscar.decode_attention(q, part.cache, **part.tables, return_lse=True) for part in parts]
    out, lse = foscar.merge_states(*zip(*states, strict=True))
    want_out, want_lse = foscar.decode_attention(q, whole.cache, **whole.tables, return_lse=True)
    assert torch.allclose(out, want_out, atol=1e-5) and torch.allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_merge_states(dtype: torch.dtype) -> None:
    scores, values = torch.randn(4, 3, 5, 7) * 10, torch.randn(4, 3, 5, 7, 16)
    scores[1, 0] = -torch.inf
    scores[:, 2, 4] = -torch.inf
    lses = scores.logsumexp(-1)
    outs = torch.einsum("spht,sphtd->sphd", torch.exp(scores - lses[..., None]).nan_to_num(), values)
    outs[1, 0] = torch.nan  # an empty state's output is not looked at
    out, lse = foscar.merge_states([o.to(dtype) for o in outs], list(lses))
    every = scores.movedim(0, -2).flatten(-2).double()
    want_lse = every.logsumexp(-1)
    want = torch.einsum(
        "pht,phtd->phd", torch.softmax(every, -1).nan_to_num(), values.movedim(0, 2).flatten(2, 3).double()
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out[2, 4] == 0).all() and lse[2, 4] == -torch.inf
    assert relative_error(out, want) < BOUNDS[dtype]
    finite = want_lse > -torch.inf
    assert torch.allclose(lse[finite].double(), want_lse[finite], atol=1e-5)


def test_a_long_context_is_attended_in_steps() -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(2, 4, 64), [32_768])
    q = torch.randn(1, 8, 64)
    check(batch, q, BOUNDS[torch.float32])
    short = {**batch.tables, "seq_lens": i32([64])}
    got = foscar.decode_attention(q, batch.cache, **short)
    k, v = batch.dequantized()[0]
    assert relative_error(got, oracle(q, k[:64], v[:64])[0]) < 1e-5
