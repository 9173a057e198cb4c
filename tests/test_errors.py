"""Bad arguments are refused before anything happens, by a ValueError that names argument, value and rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import i32, make_batch, snapshot

import foscar

HEADS, DIM = 2, 64
PLAIN = foscar.CacheSpec.token_wise(2, HEADS, DIM)
WINDOWED = foscar.CacheSpec.kivi(2, HEADS, DIM, sink_tokens=4, recent_tokens=20)


def refused(cache: foscar.PagedKVCache, message: str, call: Any, *args: Any, **kwargs: Any) -> None:
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        call(cache, *args, **kwargs)
    assert snapshot(cache) == before


def kv(tokens: int = 5, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, heads, dim).to(dtype)


def nan_at(*position: int) -> torch.Tensor:
    x = kv()
    x[position] = torch.nan
    return x


# Each replaces arguments of a good append of 3 and 2 tokens to sequences of 70 and 64.
BAD_APPENDS: list[tuple[str, dict[str, Any]]] = [
    (r"k='list': must be a torch.Tensor", {"k": [1.0]}),
    (r"k.shape=\[5, 3, 64\]: must be \[total_tokens, 2, 64\]", {"k": kv(heads=3)}),
    (r"k.shape=\[5, 2, 128\]", {"k": kv(dim=128)}),
    (r"k.shape=\[5, 128\]", {"k": kv().flatten(1)}),
    (r"k.dtype=torch.float64", {"k": kv().double()}),
    (r"cos_sin_cache.dtype=torch.float64", {"cos_sin_cache": torch.zeros(9, 64).double()}),
    (r"cos_sin_cache.shape=\[64\]: must be \[positions, rotary_dim\]", {"cos_sin_cache": torch.zeros(64)}),
    (r"rotary_dim=24: must be a multiple of 16, at most head_dim, 64", {"cos_sin_cache": torch.zeros(9, 24)}),
    (r"rotary_dim=80: must be a multiple of 16", {"cos_sin_cache": torch.zeros(9, 80)}),
    (r"rotary_dim=0: must be a multiple of 16", {"cos_sin_cache": torch.zeros(9, 0)}),
    (r"k.device='meta': must be cpu", {"k": kv().to("meta")}),
    (r"v.shape=\[4, 2, 64\]: must be \[5, 2, 64\]", {"v": kv(4)}),
    (r"v.dtype=torch.bfloat16: must be torch.float32", {"v": kv(dtype=torch.bfloat16)}),
    (r"k\[4, 1, 63\]=nan: must be finite", {"k": nan_at(4, 1, 63)}),
    (r"v\[0, 0, 0\]=nan", {"v": nan_at(0, 0, 0)}),
    (r"block_table.shape=\[2\]: must be \[batch, max_pages\]", {"block_table": i32([0, 1])}),
    (r"block_table.dtype=torch.int64: must be torch.int32", {"block_table": torch.tensor([[0, 1], [2, 3]])}),
    (r"block_table.shape=\[2, 1\]: row 0 needs 2 columns", {"block_table": i32([[0], [1]])}),
    (r"block_table\[0, 1\]=-1: must be in \[0, 7\)", {"block_table": i32([[0, -1], [1, 2]])}),
    (r"block_table\[1, 1\]=7: must be in \[0, 7\)", {"block_table": i32([[0, 1], [2, 7]])}),
    (r"block_table=1: must not be written twice by one append", {"block_table": i32([[0, 1], [2, 1]])}),
    (r"seq_lens.shape=\[1\]: must be \[2\]", {"seq_lens": i32([70])}),
    (r"seq_lens.dtype=torch.int64", {"seq_lens": torch.tensor([70, 64])}),
    (r"seq_lens\[1\]=-1: must not be negative", {"seq_lens": i32([70, -1])}),
    (r"block_table.shape=\[2, 4\]: row 0 needs 16384 columns", {"seq_lens": i32([2**20 - 3, 64])}),
    (r"cu_seqlens.shape=\[2\]: must be \[3\]", {"cu_seqlens": i32([0, 5])}),
    (r"cu_seqlens\[0\]=1: must be 0", {"cu_seqlens": i32([1, 3, 5])}),
    (r"cu_seqlens\[-1\]=4: must be the number of tokens in k, 5", {"cu_seqlens": i32([0, 3, 4])}),
    (r"cu_seqlens\[2\]=5: must be at least 6", {"cu_seqlens": i32([0, 6, 5])}),
]


@pytest.mark.parametrize(("message", "bad"), BAD_APPENDS, ids=lambda x: x if isinstance(x, str) else "")
def test_append(message: str, bad: dict[str, Any]) -> None:
    batch = make_batch(PLAIN, [70, 64])
    pages = [page for page in range(7) if page not in batch.block_table[:, :1]]
    table = batch.block_table.clone()
    table[1, 1] = next(page for page in pages if page not in batch.block_table)
    good = {
        "k": kv(),
        "v": kv(),
        "block_table": table,
        "seq_lens": batch.seq_lens,
        "cu_seqlens": i32([0, 3, 5]),
    }
    refused(batch.cache, message, foscar.append, **{**good, **bad})
    foscar.append(batch.cache, **good)


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (
            r"k.dtype=torch.bfloat16: must be torch.float32",
            {"k": kv(dtype=torch.bfloat16), "v": kv(dtype=torch.bfloat16)},
        ),
        (r"seq_ids.shape=\[1\]: must be \[2\]", {"seq_ids": i32([0])}),
        (r"seq_ids.dtype=torch.int64", {"seq_ids": torch.tensor([0, 1])}),
        (r"seq_ids\[1\]=4: must be in \[0, 4\), the cache's max_seqs", {"seq_ids": i32([0, 4])}),
        (r"seq_ids\[0\]=-1", {"seq_ids": i32([-1, 0])}),
        (r"seq_ids=1: must not be written twice by one append", {"seq_ids": i32([1, 1]), "seq_lens": i32([0, 0])}),
        (r"v\[0, 0, 0\]=nan", {"v": nan_at(0, 0, 0)}),
        (r"seq_lens\[0\]=63: must be a multiple of 64 to append where blocks", {"seq_lens": i32([63, 70])}),
        (r"seq_lens\[0\]=1000: must not exceed the tokens appended for seq_id", {"seq_lens": i32([1000, 70])}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_append_with_a_window(message: str, bad: dict[str, Any]) -> None:
    batch = make_batch(WINDOWED, [90, 70])
    good = {"k": kv(), "v": kv(), "cu_seqlens": i32([0, 3, 5]), **batch.tables}
    refused(batch.cache, message, foscar.append, **{**good, **bad})
    foscar.append(batch.cache, **good)


Q = torch.randn(2, 4, DIM)
BAD_DECODES: list[tuple[str, dict[str, Any]]] = [
    (r"q='list': must be a tensor of 3 or 4 dimensions", {"q": [1.0]}),
    (r"q=\[4, 64\]: must be a tensor of 3 or 4 dimensions", {"q": Q[0]}),
    (r"q.shape=\[2, 4, 32\]: must be \[batch, num_q_heads, 64\]", {"q": Q[..., :32]}),
    (r"q.dtype=torch.float64", {"q": Q.double()}),
    (r"q.device='meta'", {"q": Q.to("meta")}),
    (r"num_q_heads=3: must be a positive multiple of num_kv_heads, 2", {"q": Q[:, :3]}),
    (r"num_q_heads=0", {"q": Q[:, :0]}),
    (r"q_len=0: must be at least 1", {"q": Q[:, None][:, :0]}),
    (r"block_table.shape=\[1, 4\]: must be \[2, max_pages\]", {"block_table": i32([[0, 1, 2, 3]])}),
    (r"block_table.shape=\[2, 1\]: row 0 needs 2 columns", {"block_table": i32([[0], [1]])}),
    (r"block_table\[0, 1\]=99: must be in \[0, 7\)", {"block_table": i32([[0, 99], [1, 2]])}),
    (r"seq_lens.shape=\[3\]: must be \[2\]", {"seq_lens": i32([1, 2, 3])}),
    (r"seq_lens\[0\]=-5: must not be negative", {"seq_lens": i32([-5, 1])}),
    (r"block_table.shape=\[2, 4\]: row 1 needs 5 columns", {"seq_lens": i32([1, 257])}),
    (r"sm_scale=nan: must be a finite float", {"sm_scale": float("nan")}),
    (r"softcap=-1.0: must be a finite float, positive", {"softcap": -1.0}),
    (r"softcap=inf", {"softcap": float("inf")}),
    (r"window=-2: must be an int of at least -1", {"window": -2}),
    (r"window=\(128, 0\): must be an int", {"window": (128, 0)}),
    (r"window=True: must be an int", {"window": True}),
    (r"sm_scale='x': must be a finite float", {"sm_scale": "x"}),
    (r"sinks.shape=\[2\]: must be \[4\]", {"sinks": torch.zeros(2)}),
    (r"sinks.dtype=torch.int64", {"sinks": torch.zeros(4, dtype=torch.int64)}),
    (r"out.shape=\[2, 4, 32\]: must be \[2, 4, 64\]", {"out": torch.empty(2, 4, 32)}),
    (r"out.dtype=torch.float16: must be torch.float32", {"out": torch.empty(2, 4, 64).half()}),
    (r"out.stride\(\)=\(0, 64, 1\): must give each element a place", {"out": torch.empty(1, 4, 64).expand(2, 4, 64)}),
    (r"out.device='meta'", {"out": torch.empty(2, 4, 64, device="meta")}),
]


@pytest.mark.parametrize(("message", "bad"), BAD_DECODES, ids=lambda x: x if isinstance(x, str) else "")
def test_decode_attention(message: str, bad: dict[str, Any]) -> None:
    batch = make_batch(PLAIN, [70, 64])
    good = {"q": Q, "block_table": batch.block_table, "seq_lens": batch.seq_lens}
    out = torch.full_like(Q, 7.0)

    def decode(cache: foscar.PagedKVCache, q: Any, **options: Any) -> None:
        foscar.decode_attention(q, cache, **{"out": out, **options})

    refused(batch.cache, message, decode, **{**good, **bad})
    assert (out == 7).all()
    decode(batch.cache, **good)
    assert not (out == 7).any()


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (r"seq_ids\[0\]=9: must be in \[0, 4\)", {"seq_ids": i32([9, 0])}),
        (r"seq_lens\[1\]=200: must not exceed the tokens appended for seq_id", {"seq_lens": i32([1, 200])}),
    ],
)
def test_reading_a_window(message: str, bad: dict[str, Any]) -> None:
    batch = make_batch(WINDOWED, [90, 70])
    good = batch.tables
    refused(batch.cache, message, lambda c, **a: foscar.decode_attention(Q, c, **a), **{**good, **bad})
    refused(batch.cache, message, foscar.dequantize, **{**good, **bad})


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (r"block_table.dtype=torch.int64", {"block_table": torch.tensor([[0, 1]])}),
        (r"seq_lens.shape=\[2\]: must be \[1\]", {"seq_lens": i32([1, 2])}),
        (r"block_table\[0, 0\]=-1: must be in \[0, 5\)", {"block_table": i32([[-1, 0]])}),
        (r"seq_lens\[0\]=-1: must not be negative", {"seq_lens": i32([-1])}),
    ],
)
def test_dequantize(message: str, bad: dict[str, Any]) -> None:
    batch = make_batch(PLAIN, [70])
    good = {"block_table": batch.block_table, "seq_lens": batch.seq_lens}
    refused(batch.cache, message, foscar.dequantize, **{**good, **bad})
    foscar.dequantize(batch.cache, **good)


def test_a_window_that_was_never_filled() -> None:
    cache = foscar.PagedKVCache(WINDOWED, 4)
    table = i32([[0]])
    message = r"seq_lens\[0\]=1: must not exceed the tokens appended for seq_id 0"
    refused(cache, message, foscar.dequantize, table, i32([1]))
    k, _ = foscar.dequantize(cache, table, i32([0]))
    assert k.shape == (0, HEADS, DIM)


def test_a_refused_first_append_leaves_the_dtype_open() -> None:
    cache = foscar.PagedKVCache(WINDOWED, 4, max_seqs=2)
    table, zero, ends = i32([[0]]), i32([0]), i32([0, 5])
    message = r"k\[4, 0, 0\]=nan"
    with pytest.raises(ValueError, match=message):
        foscar.append(cache, nan_at(4, 0, 0), kv(), table, zero, ends, seq_ids=i32([1]))
    foscar.append(cache, kv(dtype=torch.bfloat16), kv(dtype=torch.bfloat16), table, zero, ends)
    assert cache.exact.dtype == torch.bfloat16


def test_sequences_that_were_named_must_be_named() -> None:
    batch = make_batch(WINDOWED, [90, 70])
    message = r"seq_ids=None: must be given, as it was when this cache was appended to"
    good = {"block_table": batch.block_table, "seq_lens": batch.seq_lens}
    refused(batch.cache, message, foscar.dequantize, **good)
    refused(batch.cache, message, foscar.append, k=kv(), v=kv(), cu_seqlens=i32([0, 3, 5]), **good)


def test_what_is_no_cache() -> None:
    batch = make_batch(PLAIN, [70])
    tables = {"block_table": batch.block_table, "seq_lens": batch.seq_lens}
    message = "cache='Tensor': must be a foscar.PagedKVCache"
    with pytest.raises(ValueError, match=message):
        foscar.decode_attention(Q[:1], batch.cache.pages, **tables)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=message):
        foscar.dequantize(batch.cache.pages, **tables)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        foscar.append(batch.cache.pages, kv(), kv(), **tables, cu_seqlens=i32([0, 5]))  # type: ignore[arg-type]


def test_more_sequences_than_rows() -> None:
    cache = foscar.PagedKVCache(WINDOWED, 4, max_seqs=2)
    refused(cache, r"batch=3: must not exceed the cache's max_seqs, 2", foscar.dequantize, i32([[0]] * 3), i32([0] * 3))


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"spec='k2': must be a foscar.CacheSpec", {"spec": "k2", "num_pages": 1}),
        (r"num_pages=0: must be an int of at least 1", {"spec": PLAIN, "num_pages": 0}),
        (r"num_pages=1.5: must be an int", {"spec": PLAIN, "num_pages": 1.5}),
        (r"max_seqs=0: must be an int of at least 1", {"spec": WINDOWED, "num_pages": 1, "max_seqs": 0}),
        (r"dtype=torch.int8: must be one of", {"spec": WINDOWED, "num_pages": 1, "dtype": torch.int8}),
        (r"dtype='bfloat16': must be one of", {"spec": WINDOWED, "num_pages": 1, "dtype": "bfloat16"}),
    ],
)
def test_cache(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        foscar.PagedKVCache(**arguments)


OUT, LSE = torch.zeros(3, 4, 8), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("message", "outs", "lses"),
    [
        (r"len(outs)=0: must be at least 1", [], []),
        (r"len(lses)=1: must be that of outs, 2", [OUT, OUT], [LSE]),
        (r"outs[1].shape=[3, 4, 9]: must be [3, 4, 8]", [OUT, torch.zeros(3, 4, 9)], [LSE, LSE]),
        (r"outs[1].dtype=torch.float16: must be torch.float32", [OUT, OUT.half()], [LSE, LSE]),
        (r"lses[0].shape=[3]: must be [3, 4]", [OUT], [LSE[:, 0]]),
        (r"lses[0].dtype=torch.float64: must be torch.float32", [OUT], [LSE.double()]),
        (r"device of outs[0], lses[0]='cpu, meta': must be cpu", [OUT], [LSE.to("meta")]),
    ],
)
def test_merge_states(message: str, outs: list[torch.Tensor], lses: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        foscar.merge_states(outs, lses)
