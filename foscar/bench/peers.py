"""FlashInfer's kernels, called as their documentation says. Optional: ``foscar[bench]``."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from foscar.bench.grid import Point
from foscar.bench.workload import SAMPLE_PAGES, Workload, fill, num_layers, page_tables
from foscar.layout import PAGE_SIZE

_WORKSPACE_BYTES = 512 << 20
_SEMAPHORES = 8 << 20


@dataclass(frozen=True)
class Peer:
    """A kernel to compare with.

    Attributes
    ----------
    name : str
        What it is called in messages.
    column : str
        Where its time goes in the CSV file.
    workload : callable
        Fills caches for a point.
    tolerance : float
        Relative error that tells a wrong call, not a coarse result: a kernel that works in FP8 rounds the query and
        the probabilities, too, to 4 bits.
    """

    name: str
    column: str
    workload: Callable[[Point, torch.device], Workload]
    tolerance: float


def installed() -> bool:
    """Whether FlashInfer can be imported."""
    return importlib.util.find_spec("flashinfer") is not None


def fa2(point: Point, device: torch.device) -> Workload:
    """Attend with FlashInfer's tensor-core decode over BF16 pages, its plan made beforehand."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    block_table, seq_lens = page_tables(point, device)
    indices = torch.cat([row[:pages] for row, pages in zip(block_table, point.seq_pages, strict=True)])
    indptr = torch.tensor([0, *itertools.accumulate(point.seq_pages)], dtype=torch.int32)
    shape = (len(indices), 2, PAGE_SIZE, point.num_kv_heads, point.head_dim)
    caches = _random_caches(shape, torch.bfloat16, device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(indptr, device=device),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(seq_lens),
        backend="auto",
    )
    wrapper.plan(
        indptr,
        indices,
        (seq_lens.cpu() - 1) % PAGE_SIZE + 1,
        point.num_q_heads,
        point.num_kv_heads,
        point.head_dim,
        PAGE_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = torch.randn(point.batch, point.num_q_heads, point.head_dim, device=device).bfloat16()
    out = torch.empty_like(q)

    def sequence(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = caches[-1][block_table[b, : point.seq_pages[b]]]
        k, v = held.transpose(0, 1).flatten(1, 2)[:, : point.seq_lens[b]]
        return k, v

    return Workload([partial(wrapper.run, q, kv, out=out) for kv in caches], q, out, sequence, caches[0].nbytes)


def xqa(dtype: torch.dtype, point: Point, device: torch.device) -> Workload:
    """Attend with TensorRT-LLM's kernel, as FlashInfer ships it, over pages of BF16 or FP8."""
    from flashinfer.xqa import xqa as kernel

    block_table, seq_lens = page_tables(point, device)
    shape = (2 * sum(point.seq_pages), point.num_kv_heads, PAGE_SIZE, point.head_dim)
    caches = _random_caches(shape, dtype, device)
    q = torch.randn(point.batch, 1, point.num_q_heads, point.head_dim, device=device).bfloat16()
    out = torch.empty_like(q)
    lengths = seq_lens.view(torch.uint32)[:, None]
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(_SEMAPHORES, dtype=torch.uint32, device=device)

    def sequence(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = block_table[b, : point.seq_pages[b]]
        k, v = (half[rows].transpose(1, 2).flatten(0, 1)[: point.seq_lens[b]] for half in caches[-1].chunk(2))
        return k, v

    def attend(k: torch.Tensor, v: torch.Tensor) -> None:
        kernel(
            q,
            k,
            v,
            block_table,
            lengths,
            out,
            workspace,
            semaphores,
            point.num_kv_heads,
            PAGE_SIZE,
            kv_layout="HND",
        )

    calls = [partial(attend, *cache.chunk(2)) for cache in caches]
    return Workload([*calls], q[:, 0], out[:, 0], sequence, caches[0].nbytes)


def _random_caches(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return as many caches of random pages as exceed the L2; pages are the first axis."""
    samples = torch.randn(SAMPLE_PAGES, *shape[1:], device=device).to(dtype)
    nbytes = samples[0].nbytes * shape[0]
    caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers(nbytes, device))]
    for cache in caches:
        fill(cache, samples)
    return caches


PEERS = (
    Peer("FlashInfer fa2 BF16", "fa2_bf16_us", fa2, 1e-2),
    Peer("XQA BF16", "xqa_bf16_us", partial(xqa, torch.bfloat16), 1e-2),
    Peer("XQA FP8", "xqa_fp8_us", partial(xqa, torch.float8_e4m3fn), 0.1),
)
