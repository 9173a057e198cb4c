"""Caches full of random tokens, calls that attend to them, and what the output should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from foscar.attention import decode_attention
from foscar.bench.grid import Case, Point
from foscar.cache import PagedKVCache, append, dequantize
from foscar.layout import PAGE_SIZE, CacheSpec

SAMPLE_PAGES = 256
_PAGES_AT_ONCE = 4096


@dataclass(frozen=True)
class Workload:
    """The same attention over several caches, as the layers of a model do it.

    Attributes
    ----------
    calls : list of callable
        One for each layer: attends to its cache with `q`, and writes `out`.
    q, out : torch.Tensor
        ``[batch, num_q_heads, head_dim]``, shared by all.
    sequence : callable
        Returns keys and values of one sequence of the last layer, ``[tokens, num_kv_heads, head_dim]`` each.
    nbytes : int
        What one layer's cache takes.
    """

    calls: list[Callable[[], object]]
    q: torch.Tensor
    out: torch.Tensor
    sequence: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    nbytes: int


def num_layers(nbytes: int, device: torch.device) -> int:
    """Return how many caches of `nbytes` it takes that none is in the L2 when its turn comes: three times the L2."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return max(1, math.ceil(3 * l2 / nbytes))


def page_tables(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block table of shuffled pages, padded with page 0, and the lengths: int32."""
    pages = torch.randperm(sum(point.seq_pages), dtype=torch.int32).split(point.seq_pages)
    lengths = torch.tensor(point.seq_lens, dtype=torch.int32, device=device)
    return torch.nn.utils.rnn.pad_sequence([*pages], batch_first=True).to(device), lengths


def fill(target: torch.Tensor, samples: torch.Tensor) -> None:
    """Overwrite each page of `target`, its first axis, with a random one of `samples`."""
    pages, source = (tensor.flatten(1).view(torch.int64) for tensor in (target, samples))
    for part in pages.split(_PAGES_AT_ONCE):
        torch.index_select(source, 0, torch.randint(len(source), (len(part),), device=part.device), out=part)


def sample_pages(spec: CacheSpec, device: torch.device) -> torch.Tensor:
    """Quantise random tokens into `SAMPLE_PAGES` pages."""
    cache = PagedKVCache(replace(spec, sink_tokens=0, recent_tokens=0), SAMPLE_PAGES, device, max_seqs=1)
    shape = (SAMPLE_PAGES * PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    pages = torch.arange(SAMPLE_PAGES, dtype=torch.int32, device=device)[None]
    ends = torch.tensor([0, len(k)], dtype=torch.int32, device=device)
    append(cache, k, v, pages, ends[:1], ends)
    return cache.pages


def foscar_workload(case: Case, device: torch.device) -> Workload:
    """Fill caches of a recipe, and attend to them with foscar."""
    spec, point = case.spec, case.point
    block_table, seq_lens = page_tables(point, device)
    samples = sample_pages(spec, device)
    nbytes = sum(spec.sequence_bytes(length) for length in point.seq_lens)
    caches = []
    for _ in range(num_layers(nbytes, device)):
        cache = PagedKVCache(spec, sum(point.seq_pages), device, torch.bfloat16, max_seqs=point.batch)
        fill(cache.pages, samples)
        if spec.exact_tokens:
            cache.exact.normal_()
            state = [[spec.quantized_len(length), length] for length in point.seq_lens]
            cache.lengths.copy_(torch.tensor(state, dtype=torch.int32))
        caches.append(cache)
    q = torch.randn(point.batch, point.num_q_heads, point.head_dim, device=device).bfloat16()
    out = torch.empty_like(q)

    def sequence(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.tensor([b], dtype=torch.int32, device=device)
        return dequantize(caches[-1], block_table[b : b + 1], seq_lens[b : b + 1], seq_ids=row)

    calls = [partial(decode_attention, q, cache, block_table, seq_lens, out=out) for cache in caches]
    return Workload([*calls], q, out, sequence, nbytes)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend in float64 with one query token ``[num_q_heads, head_dim]``, a KV head at a time to save memory."""
    groups = q.double().unflatten(0, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    outs = []
    for head, rows in enumerate(groups):
        p = torch.softmax(rows @ k[:, head].double().T, -1)
        outs.append(p @ v[:, head].double())
    return torch.cat(outs)


def relative_error(workload: Workload) -> float:
    """Compare `out`, as the last layer left it, with float64 attention, for the first and the last sequence."""
    wrong = whole = 0.0
    for b in {0, len(workload.q) - 1}:
        want = exact_attention(workload.q[b], *workload.sequence(b))
        wrong += (workload.out[b].double() - want).square().sum().item()
        whole += want.square().sum().item()
    return math.sqrt(wrong / whole)
