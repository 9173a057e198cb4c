"""The kernel that extends, emulated on a CPU and on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import emulator
import pytest
import torch
from helpers import Batch, i32, make_batch, oracle, quant_specs, relative_error, snapshot

import foscar
from foscar.cuda import extend as extend_kernel
from foscar.cuda.config import ExtendConfig
from foscar.layout import HEAD_DIMS

T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # keys, values and p are rounded to the query's dtype


def run(
    batch: Batch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: list[int],
    splits: int = 1,
    sm_scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel, and have keys split."""
    ends = i32([0, *counts], q.device).cumsum(0, dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    if q.is_cuda:
        options = {"sm_scale": sm_scale, "softcap": softcap, "window": window, "sinks": sinks, "return_lse": True}
        where = (batch.block_table, batch.seq_lens, ends)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extend_kernel, "splits_of", lambda *_: splits)
            return foscar.extend_attention(
                q,
                k,
                v,
                batch.cache,
                *where,
                seq_ids=batch.seq_ids,
                out=out,
                **options,  # type: ignore[arg-type]
            )
    cache, spec = batch.cache, batch.cache.spec
    outs = out if splits == 1 else torch.full((splits, *q.shape), torch.nan)
    lses = torch.full((splits, *q.shape[:-1]), torch.nan)
    tables = (batch.block_table, batch.seq_lens, ends, batch.seq_ids, sinks)
    scale = spec.head_dim**-0.5 if sm_scale is None else sm_scale
    rows = q.shape[0] * q.shape[1] // (spec.num_kv_heads * len(counts))
    config = ExtendConfig.choose(spec, q.dtype, rows)
    tensors = (q, k, v, cache.pages, cache.exact, cache.lengths, *tables, outs, lses)
    emulator.extend_attention(config, splits, *tensors, scale, softcap, window)
    return (outs, lses[0]) if splits == 1 else foscar.merge_states(outs.unbind(), lses.unbind())


def check(
    spec: foscar.CacheSpec,
    cached: list[int],
    new: list[int],
    machine: torch.device,
    group: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    **options: object,
) -> None:
    batch = make_batch(spec, cached, machine, dtype)
    q = torch.randn(sum(new), group * spec.num_kv_heads, spec.head_dim, device=machine).to(dtype)
    k, v = torch.randn(2, sum(new), spec.num_kv_heads, spec.head_dim, device=machine).to(dtype)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(q.shape[1], device=machine)
    before = snapshot(batch.cache)
    out, lse = run(batch, q, k, v, new, **options)  # type: ignore[arg-type]
    assert snapshot(batch.cache) == before
    options.pop("splits", None)
    parts = zip(q.split(new), k.split(new), v.split(new), out.split(new), lse.split(new), strict=True)
    for (k_hat, v_hat), (q_b, k_b, v_b, out_b, lse_b) in zip(batch.dequantized(), parts, strict=True):
        if len(q_b):
            want, want_lse = oracle(q_b, torch.cat([k_hat, k_b]), torch.cat([v_hat, v_b]), **options)  # type: ignore[arg-type]
            assert relative_error(out_b, want) < BOUNDS[dtype]
            assert torch.allclose(lse_b.double(), want_lse, rtol=1e-4, atol=3e-2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_all_formats(head_dim: int, machine: torch.device) -> None:
    """Of either type in turn where each takes a compilation by one core."""
    quants, dtypes = quant_specs(head_dim), list(BOUNDS)
    for i, (k, v) in enumerate(zip(quants, quants[1:] + quants[:1], strict=True)):
        spec = foscar.CacheSpec(k, v, 1, head_dim, sink_tokens=i % 3 * 5)
        for dtype in [dtypes[i % 2]] if machine.type == "cpu" else dtypes:
            check(spec, [130, 0, 63], [3, 5, 2], machine, dtype=dtype)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(
    "options", [{}, {"window": 0}, {"window": 100, "softcap": 3.0}, {"sinks": True, "sm_scale": -0.3}], ids=str
)
@pytest.mark.parametrize(
    "spec",
    [T(2, 2, 64), T(4, 1, 96, sink_tokens=5, recent_tokens=20), K(2, 1, 128, sink_tokens=64, recent_tokens=130)],
    ids=str,
)
def test_ragged_batches(spec: foscar.CacheSpec, options: dict[str, object], splits: int, machine: torch.device) -> None:
    cached, new = [0, 1, 63, 64, 65, 0, 700, 300], [5, 0, 1, 64, 3, 130, 1, 70]
    check(spec, cached, new, machine, splits=splits, **options)


@pytest.mark.parametrize("group", [1, 4, 7, 16, 130])
def test_groups(group: int, machine: torch.device) -> None:
    check(T(2, 2, 64), [70, 3], [9, 1], machine, group)


def test_strided_views(machine: torch.device) -> None:
    """Rows of a packed projection."""
    spec = T(2, 2, 64)
    batch = make_batch(spec, [70, 0], machine, torch.bfloat16)
    qkv = torch.randn(50, 12 * 64, device=machine).bfloat16()
    q, k, v = (part.unflatten(1, (-1, 64)) for part in qkv.split([512, 128, 128], 1))
    got = run(batch, q, k, v, [20, 30])
    want = run(batch, q.contiguous(), k.contiguous(), v.contiguous(), [20, 30])
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_tables_that_do_not_fit(machine: torch.device) -> None:
    """Where nothing is checked, nothing outside of the cache is read, or outside of the output written."""
    spec = T(2, 1, 64, sink_tokens=2, recent_tokens=9)
    batch = make_batch(spec, [300, 300], machine, torch.bfloat16)
    q, k = torch.randn(8, 2, 64, device=machine).bfloat16(), torch.randn(8, 1, 64, device=machine).bfloat16()
    bad = [
        {"block_table": torch.full_like(batch.block_table, -1)},
        {"block_table": torch.full_like(batch.block_table, len(batch.cache.pages))},
        {"block_table": batch.block_table[:, :0]},
        {"seq_ids": i32([-1, 99], machine)},
        {"seq_lens": i32([-5, -70], machine)},
    ]
    for change in bad:
        run(replace(batch, **change), q, k, k, [5, 3])
    for counts in ([9, -3], [-2, 10], [0, 0]):
        run(batch, q, k, k, counts)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int, machine: torch.device) -> None:
    rng = random.Random(seed)
    for _ in range(2 if machine.type == "cpu" else 20):
        quants = quant_specs(64)
        windows = {"sink_tokens": rng.choice([0, 3, 70]), "recent_tokens": rng.choice([0, 2, 65])}
        spec = foscar.CacheSpec(rng.choice(quants), rng.choice(quants), rng.choice([1, 2]), 64, **windows)
        size = rng.choice([1, 3, 20])
        cached = [rng.choice([0, 1, 63, 64, 65, rng.randrange(400)]) for _ in range(size)]
        new = [rng.choice([0, 1, 2, 64, rng.randrange(200)]) for _ in range(size - 1)] + [1 + rng.randrange(100)]
        options = {"window": rng.choice([None, 70]), "softcap": rng.choice([None, 5.0]), "sinks": rng.random() < 0.5}
        check(spec, cached, new, machine, rng.choice([1, 3, 8]), splits=rng.choice([1, 3]), **options)


@pytest.fixture
def emulated_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches on the CPU reach the emulator."""
    monkeypatch.setattr(extend_kernel, "load", lambda config, _: partial(emulator.launch, config))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs a C++ compiler, g++")
@pytest.mark.usefixtures("emulated_launch")
@pytest.mark.parametrize("cached", [70, 1200], ids=["one part", "keys split"])
def test_what_is_prepared_for_a_launch(cached: int) -> None:
    """Tables, sinks and output of any strides, q that is not aligned, few rows of long sequences."""
    spec = T(2, 1, 64, recent_tokens=9)
    batch = make_batch(spec, [cached, 0], "cpu", torch.bfloat16)
    new, wide = [3, 2], torch.randn(5, 3, 65).bfloat16()
    q, k, v = wide[:, :2, 1:], torch.randn(5, 1, 64).bfloat16(), torch.randn(5, 1, 64).bfloat16()
    sinks = torch.randn(4).bfloat16()[::2]
    out, lse = torch.full((5, 2, 65), torch.nan).bfloat16()[..., 1:], torch.full((5, 2), torch.nan)
    table = batch.block_table.T.contiguous().T
    strided = i32([[0, 7], [3, 7], [5, 7]])[:, 0], torch.stack([batch.seq_ids] * 2, 1)[:, 0]
    where = (batch.cache.pages, batch.cache.exact, batch.cache.lengths, table, batch.seq_lens, *strided, sinks)
    extend_kernel.extend_attention(q, k, v, *where, out, lse, spec, 0.125, None, None, 4096)
    for b, (k_hat, v_hat) in enumerate(batch.dequantized()):
        q_b, k_b, v_b, out_b, lse_b = (x.split(new)[b] for x in (q, k, v, out, lse))
        want, want_lse = oracle(q_b, torch.cat([k_hat, k_b]), torch.cat([v_hat, v_b]), sinks=sinks)
        assert relative_error(out_b, want) < BOUNDS[torch.bfloat16]
        assert torch.allclose(lse_b.double(), want_lse, rtol=1e-4, atol=3e-2)


@pytest.mark.usefixtures("emulated_launch")
def test_nothing_is_launched_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_kernel, "load", lambda *_: pytest.fail("launched"))
    batch = make_batch(T(2, 1, 64), [3], "cpu", torch.bfloat16)
    q, k = torch.empty(0, 2, 64).bfloat16(), torch.empty(0, 1, 64).bfloat16()
    where = (batch.cache.pages, batch.cache.exact, batch.cache.lengths, batch.block_table, batch.seq_lens)
    rest = (i32([0, 0]), None, None, q, torch.empty(0, 2), batch.cache.spec, 0.125, None, None, 64)
    extend_kernel.extend_attention(q, k, k, *where, *rest)


@pytest.mark.parametrize(("tokens", "columns", "want"), [(1, 4, 1), (1, 16, 2), (1, 10_000, 33), (5000, 10_000, 1)])
def test_keys_are_split_where_rows_are_few(tokens: int, columns: int, want: int) -> None:
    """Into as many parts as occupy all SMs, of 8 pages at least."""
    config = ExtendConfig.choose(T(2, 8, 128), torch.bfloat16, 1000)
    q, table = torch.empty(tokens, 32, 128), torch.empty(1, columns, dtype=torch.int32)
    assert extend_kernel.splits_of(config, q, table, sms=132) == want
