"""Attention of new tokens to cached ones and to one another."""

from __future__ import annotations

import pytest
import torch
from helpers import Batch, i32, make_batch, oracle, relative_error, snapshot

import foscar
from foscar.reference import attention

T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi
SPECS = [T(2, 2, 64), T(4, 2, 96, group_size=32, sink_tokens=5), K(2, 2, 128, sink_tokens=64, recent_tokens=130)]
CACHED, NEW = [0, 1, 63, 64, 65, 0, 700, 300], [5, 0, 1, 64, 3, 130, 1, 70]


def extend(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: list[int], **options: object):  # type: ignore[no-untyped-def]
    ends = i32([0, *counts], q.device).cumsum(0, dtype=torch.int32)
    where = (batch.block_table, batch.seq_lens, ends)
    return foscar.extend_attention(q, k, v, batch.cache, *where, seq_ids=batch.seq_ids, return_lse=True, **options)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("block_tokens", [64, 192, 4096])
@pytest.mark.parametrize(
    "options", [{}, {"window": 0}, {"window": 100, "softcap": 3.0}, {"sinks": True, "sm_scale": 0.3}], ids=str
)
def test_ragged_batches(
    spec: foscar.CacheSpec, block_tokens: int, options: dict[str, object], device: torch.device
) -> None:
    batch = make_batch(spec, CACHED, device)
    group, total = 3, sum(NEW)
    q = torch.randn(total, group * spec.num_kv_heads, spec.head_dim, device=device)
    k, v = torch.randn(2, total, spec.num_kv_heads, spec.head_dim, device=device)
    if "sinks" in options:
        options = {**options, "sinks": torch.randn(q.shape[1], device=device)}
    before = snapshot(batch.cache)
    out = torch.full_like(q, torch.nan)
    got, lse = extend(batch, q, k, v, NEW, block_tokens=block_tokens, out=out, **options)
    assert got is out and snapshot(batch.cache) == before
    parts = zip(q.split(NEW), k.split(NEW), v.split(NEW), got.split(NEW), lse.split(NEW), strict=True)
    for (k_hat, v_hat), (q_b, k_b, v_b, out_b, lse_b) in zip(batch.dequantized(), parts, strict=True):
        if len(q_b):
            want, want_lse = oracle(q_b, torch.cat([k_hat, k_b]), torch.cat([v_hat, v_b]), **options)  # type: ignore[arg-type]
            assert relative_error(out_b, want) < 1e-5 and torch.allclose(lse_b.double(), want_lse, atol=1e-4)


@pytest.mark.parametrize("spec", [T(2, 2, 64), K(4, 2, 64, recent_tokens=10)], ids=str)
def test_rows_are_those_of_decoding(spec: foscar.CacheSpec, device: torch.device) -> None:
    """For each length across the edges of pages: new keys and values are what the cache makes of them."""
    q, k = torch.randn(200, 8, 64, device=device), torch.randn(200, 2, 64, device=device)
    for length in (1, 2, 63, 64, 65, 66, 127, 128, 129, 200):
        after = make_batch(spec, [length], device, kv=([k[:length]], [k[:length]]))
        k_hat, v_hat = after.dequantized()[0]
        want, want_lse = foscar.decode_attention(q[None, length - 1], after.cache, **after.tables, return_lse=True)
        for new in {1, min(length, 3)}:
            if spec.block_wise and length - new < spec.quantized_len(length):
                continue  # the block was not quantised yet
            before = make_batch(spec, [length - new], device, kv=([k[: length - new]], [k[: length - new]]))
            rows = slice(length - new, length)
            got, lse = extend(before, q[rows], k_hat[rows], v_hat[rows], [new])
            assert torch.allclose(got[-1], want[0], atol=1e-5) and torch.allclose(lse[-1], want_lse[0], atol=1e-5)


def test_chunks_of_a_prompt(device: torch.device) -> None:
    """With all tokens in the recent window a prompt in chunks is a prompt at once."""
    spec = T(2, 2, 64, recent_tokens=300)
    q, k, v = (torch.randn(300, heads, 64, device=device) for heads in (8, 2, 2))
    want, _ = oracle(q, k, v)
    cache = foscar.PagedKVCache(spec, 8, device)
    table, got = torch.arange(8, dtype=torch.int32, device=device)[None], []
    for begin, end in ((0, 1), (1, 64), (64, 200), (200, 300)):
        where = table, i32([begin], device), i32([0, end - begin], device)
        rows = slice(begin, end)
        got.append(foscar.extend_attention(q[rows], k[rows], v[rows], cache, *where))
        foscar.append(cache, k[rows], v[rows], *where)
    assert relative_error(torch.cat(got), want) < 1e-5


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"q.shape=\[6, 64\]: must be \[total_tokens, num_q_heads, 64\]", {"q": torch.zeros(6, 64)}),
        (r"num_q_heads=3: must be a positive multiple", {"q": torch.zeros(6, 3, 64)}),
        (r"k.shape=\[5, 2, 64\]: must be \[6, 2, 64\]", {"k": torch.zeros(5, 2, 64)}),
        (r"v.dtype=torch.bfloat16: must be torch.float32", {"v": torch.zeros(6, 2, 64).bfloat16()}),
        (r"cu_seqlens.shape=\[2\]: must be \[3\]", {"cu_seqlens": i32([0, 6])}),
        (r"cu_seqlens\[-1\]=7: must be the number of tokens in q, 6", {"cu_seqlens": i32([0, 1, 7])}),
        (r"cu_seqlens\[1\]=-1: must be at least 0", {"cu_seqlens": i32([0, -1, 6])}),
        (r"seq_lens\[1\]=-1: must not be negative", {"seq_lens": i32([70, -1])}),
        (r"block_table\[0, 1\]=99: must be in \[0, 9\)", {"block_table": i32([[0, 99], [2, 3]])}),
        (r"block_tokens=100: must be a multiple of 64", {"block_tokens": 100}),
        (r"block_tokens=0: must be an int of at least 64", {"block_tokens": 0}),
        (r"window=-2", {"window": -2}),
        (r"softcap=-1", {"softcap": -1}),
        (r"out.shape=\[1\]", {"out": torch.zeros(1)}),
        (r"cache='int'", {"cache": 3}),
    ],
)
def test_arguments_that_do_not_fit(message: str, change: dict[str, object]) -> None:
    arguments = {
        "q": torch.zeros(6, 4, 64),
        "k": torch.zeros(6, 2, 64),
        "v": torch.zeros(6, 2, 64),
        "cache": foscar.PagedKVCache(T(2, 2, 64), 9),
        "block_table": i32([[0, 1], [2, 3]]),
        "seq_lens": i32([70, 0]),
        "cu_seqlens": i32([0, 2, 6]),
        "out": torch.full((6, 4, 64), 7.0),
    }
    foscar.extend_attention(**{**arguments, "out": None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        foscar.extend_attention(**{**arguments, **change})  # type: ignore[arg-type]
    assert (arguments["out"] == 7).all()  # type: ignore[attr-defined]


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(T(2, 2, 64), [700], "cpu")
    q, k = torch.randn(300, 4, 64), torch.randn(300, 2, 64)
    seen = []

    def softmax(query: object, dots: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(dots.shape[-1])
        return whole(query, dots, *rest)  # type: ignore[arg-type]

    whole = attention._softmax
    monkeypatch.setattr(attention, "_softmax", softmax)
    extend(batch, q, k, k, [300], block_tokens=128)
    assert max(seen) == 128 and sum(seen) == 704 + 300


def test_compiled(device: torch.device) -> None:
    batch = make_batch(T(2, 2, 64), [100, 30], device)
    q, k = torch.randn(9, 4, 64, device=device), torch.randn(9, 2, 64, device=device)
    where = (batch.block_table, batch.seq_lens, i32([0, 4, 9], device))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: torch.Tensor) -> torch.Tensor:
        return foscar.extend_attention(q * 2, k, k, batch.cache, *where)

    assert torch.equal(call(q), foscar.extend_attention(q * 2, k, k, batch.cache, *where))
