"""The torch.library operators: schemas, meta kernels, torch.compile."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import Batch, i32, make_batch

import foscar

SPECS = [foscar.CacheSpec.token_wise(2, 2, 64), foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=4, recent_tokens=30)]
HAS_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None
BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not HAS_COMPILER, reason="Inductor needs a C++ compiler")),
]


@pytest.fixture(autouse=True)
def no_earlier_compilations() -> None:
    torch._dynamo.reset()


def cache_tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    cache = batch.cache
    return cache.pages, cache.exact, cache.lengths


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compile_of_decode_attention(spec: foscar.CacheSpec, backend: str, device: torch.device) -> None:
    batch = make_batch(spec, [150, 0, 33], device)
    sinks = torch.randn(4, device=device)

    def step(q: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tables = {"block_table": batch.block_table, "seq_lens": seq_lens, "seq_ids": batch.seq_ids}
        first, lse = foscar.decode_attention(q * 2, batch.cache, **tables, return_lse=True)
        second = foscar.decode_attention(q + first, batch.cache, **tables, softcap=3.0, window=20, sinks=sinks, out=out)
        return *foscar.merge_states([first, second], [lse, lse]), second * 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for lens in (batch.seq_lens, batch.seq_lens // 2):
        q = torch.randn(3, 4, 64, device=device)
        out, want_out = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
        for got, want in zip(compiled(q, lens, out), step(q, lens, want_out), strict=True):
            assert torch.allclose(got, want, atol=1e-6)
        assert torch.equal(out, want_out)
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=-1"):
        compiled(q, batch.seq_lens - 151, out)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compiled_shapes_may_change(spec: foscar.CacheSpec, dynamic: bool | None) -> None:
    batch = make_batch(spec, [150, 5, 33, 70])

    def step(k: torch.Tensor, q: torch.Tensor, tables: dict[str, torch.Tensor]) -> torch.Tensor:
        lens = tables["seq_lens"]
        ends = torch.arange(len(lens) + 1, dtype=torch.int32) * (k.shape[0] // len(lens))
        before = {**tables, "seq_lens": lens - ends.diff()}
        foscar.append(batch.cache, k, k, cu_seqlens=ends, **before)
        state = foscar.decode_attention(q, batch.cache, **tables, return_lse=True)
        return foscar.merge_states([state[0]] * 2, [state[1]] * 2)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size, q_len in ((4, 1), (3, 1), (2, 3), (1, 2)):
        rows = {name: tensor[:size] for name, tensor in batch.tables.items()}
        k, q = torch.randn(size * q_len, 2, 64), torch.randn(size, q_len, 6, 64)
        got = compiled(k, q, rows)
        want = foscar.decode_attention(q, batch.cache, **rows)
        assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nothing_is_differentiable(spec: foscar.CacheSpec) -> None:
    batch = make_batch(spec, [100])
    k, q = torch.randn(1, 2, 64, requires_grad=True), torch.randn(1, 4, 64, requires_grad=True)
    foscar.append(batch.cache, k, k, batch.block_table, batch.seq_lens, i32([0, 1]), seq_ids=batch.seq_ids)
    assert not batch.cache.exact.requires_grad and not batch.cache.pages.requires_grad
    assert not foscar.decode_attention(q, batch.cache, **batch.tables).requires_grad


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compile_of_a_whole_step(spec: foscar.CacheSpec, device: torch.device) -> None:
    batches = [make_batch(spec, [100], device) for _ in range(2)]
    batches[1].cache.pages.copy_(batches[0].cache.pages)
    batches[1].cache.exact.copy_(batches[0].cache.exact)
    batches[1].cache.lengths.copy_(batches[0].cache.lengths)
    tables = batches[0].tables

    def step(cache: foscar.PagedKVCache, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        lens = tables["seq_lens"]
        foscar.append(cache, k, v, tables["block_table"], lens, i32([0, 1], device), seq_ids=tables["seq_ids"])
        k_hat, _ = foscar.dequantize(cache, tables["block_table"], lens + 1, seq_ids=tables["seq_ids"])
        out = foscar.decode_attention(q, cache, tables["block_table"], lens + 1, seq_ids=tables["seq_ids"])
        return out + k_hat.sum()

    k, v = torch.randn(2, 1, 2, 64, device=device)
    q = torch.randn(1, 4, 64, device=device)
    want = step(batches[0].cache, k, v, q)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # PyTorch 2.8 wants it said
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(batches[1].cache, k, v, q)
    assert torch.allclose(got, want, rtol=1e-5)
    for a, b in zip(cache_tensors(batches[0]), cache_tensors(batches[1]), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_opcheck() -> None:
    # A spec with a window, because opcheck cannot copy empty tensors with several dimensions.
    batch = make_batch(SPECS[1], [100, 64])
    recipe = batch.cache.recipe
    kv = torch.randn(3, 2, 64)
    tables = (batch.block_table, batch.seq_lens)
    torch.library.opcheck(
        torch.ops.foscar.append,
        (
            *cache_tensors(batch),
            kv,
            kv,
            *tables,
            i32([0, 2, 3]),
            batch.seq_ids,
            None,
            True,
            None,
            torch.eye(64),
            recipe,
        ),
    )
    q, lse = torch.randn(2, 1, 4, 64), torch.empty(2, 1, 4)
    torch.library.opcheck(
        torch.ops.foscar.decode_attention,
        (q, *cache_tensors(batch), *tables, batch.seq_ids, None, torch.empty_like(q), lse, recipe, 0.125, None, 7),
    )
    torch.library.opcheck(torch.ops.foscar.dequantize, (*cache_tensors(batch), *tables, batch.seq_ids, recipe))
