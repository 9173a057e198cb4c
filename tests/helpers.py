"""What tests share: an oracle, and caches whose unused memory is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import foscar
from foscar.layout import HEAD_DIMS, PAGE_SIZE


def i32(values: object, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def quant_specs(head_dim: int) -> list[foscar.QuantSpec]:
    groups = sorted({g for g in (head_dim, 64, 32) if head_dim % g == 0})
    return [
        foscar.QuantSpec(bits, axis, group)
        for bits in (2, 4)
        for axis, group in [("token", g) for g in groups] + [("channel", PAGE_SIZE)]
    ]


def all_specs(num_kv_heads: int, **window: int) -> list[foscar.CacheSpec]:
    return [
        foscar.CacheSpec(k, v, num_kv_heads, head_dim, **window)
        for head_dim in HEAD_DIMS
        for k in quant_specs(head_dim)
        for v in quant_specs(head_dim)
    ]


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of q [q_len, num_q_heads, head_dim] to k and v [tokens, num_kv_heads, head_dim]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("mhd,thd->mht", q, k) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None, None]
    key = torch.arange(len(k), device=q.device)
    hidden = key > position
    if window is not None:
        hidden = hidden | (key < position - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sinks is None else torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks.double()))
    p = torch.exp(scores - total.masked_fill(total == -torch.inf, 0)[..., None])
    return torch.einsum("mht,thd->mhd", p, v), total


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()


@dataclass
class Batch:
    """A cache with sequences in it, on shuffled pages; whatever was not appended is poison."""

    cache: foscar.PagedKVCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    seq_ids: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        return {"block_table": self.block_table, "seq_lens": self.seq_lens, "seq_ids": self.seq_ids}

    def dequantized(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        k, v = foscar.dequantize(self.cache, **self.tables)
        lengths = self.seq_lens.tolist()
        return list(zip(k.split(lengths), v.split(lengths), strict=True))


def make_batch(
    spec: foscar.CacheSpec,
    lengths: list[int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None,
    rotations: Sequence[torch.Tensor | None] = (),
) -> Batch:
    columns = max(-(-max(lengths) // PAGE_SIZE), 1)
    num_pages = len(lengths) * columns + 3
    cache = foscar.PagedKVCache(spec, num_pages, device, dtype, len(lengths) + 2, *rotations)
    poison(cache)
    pages = torch.randperm(num_pages, dtype=torch.int32)[: len(lengths) * columns].view(len(lengths), columns)
    # Columns past the sequence, and a few more than any needs, lead out of the cache.
    for row, length in zip(pages, lengths, strict=True):
        row[-(-length // PAGE_SIZE) :] = -1
    block_table = torch.cat([pages, torch.full((len(lengths), 2), 2**31 - 1, dtype=torch.int32)], 1).to(device)
    if kv is None:
        shape = (spec.num_kv_heads, spec.head_dim)
        kv = tuple([torch.randn(n, *shape, device=device).to(dtype) for n in lengths] for _ in range(2))
    seq_ids = torch.randperm(len(lengths) + 2, dtype=torch.int32)[: len(lengths)].to(device)
    ends = i32([0, *lengths], device).cumsum(0, dtype=torch.int32)
    zeros = torch.zeros(len(lengths), dtype=torch.int32, device=device)
    foscar.append(cache, torch.cat(kv[0]), torch.cat(kv[1]), block_table, zeros, ends, seq_ids=seq_ids)
    return Batch(cache, block_table, i32(lengths, device), seq_ids, *kv)


def poison(cache: foscar.PagedKVCache) -> None:
    """Fill a cache with bytes that are NaN as parameters and the largest codes, and its window with NaN."""
    cache.pages.fill_(0xFF)
    cache.exact.fill_(torch.nan)
    cache.lengths.fill_(2**31 - 1)


def snapshot(cache: foscar.PagedKVCache) -> tuple[bytes, ...]:
    """Everything a cache holds."""
    tensors = (cache.pages, cache.exact.view(torch.uint8), cache.lengths)
    return tuple(tensor.cpu().numpy().tobytes() for tensor in tensors)
