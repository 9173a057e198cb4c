"""Attention by affine folding, one sequence at a time.

Dequantised K and V are never formed. Scale and offset act on what is small: on scores and probabilities where they
belong to a token, on the query and the output where they belong to a channel (docs/numerics.md has the algebra).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from foscar.layout import PAGE_SIZE, CacheSpec, OperandLayout, RecordLayout, record_layout
from foscar.merge import merge_states
from foscar.reference.cache import SequenceState, read_block_table, read_bounds, read_states
from foscar.reference.records import read_codes, read_params

_PAGES_PER_STEP = 64


@dataclass(frozen=True)
class _Query:
    """The query rows of one sequence, by KV head, and what the softmax needs to know of them."""

    rows: torch.Tensor  # [num_kv_heads, rows, head_dim], float32
    position: torch.Tensor  # [rows], of each row's token in the sequence
    sm_scale: float
    softcap: float | None
    window_left: int | None


@contextmanager
def _full_float32_products() -> Iterator[None]:
    """Keep the process's choice of faster, coarser matrix products out of the specification."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


@_full_float32_products()
def decode_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: CacheSpec,
    sm_scale: float,
    softcap: float | None,
    window_left: int | None,
) -> None:
    """Write attention into `out` ``[batch, q_len, num_q_heads, head_dim]`` and `lse` ``[batch, q_len, num_q_heads]``.

    Arguments are those of `foscar.decode_attention`, its 3-D query unsqueezed, and the tensors of a cache.
    """
    q_len = q.shape[1]
    states, visible, page_rows = read_tables(pages, lengths, block_table, seq_lens, seq_ids, spec, q_len, window_left)
    layout = record_layout(spec, pages.device)
    for b, (state, positions, page_ids) in enumerate(zip(states, visible, page_rows, strict=True)):
        query = _query(q[b], state.length - q_len, spec, sm_scale, softcap, window_left)
        parts = _attend_cache(query, pages, exact, state, positions, page_ids, layout, _PAGES_PER_STEP)
        _finish(parts, query, sinks, out[b], lse[b])


@_full_float32_products()
def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: CacheSpec,
    sm_scale: float,
    softcap: float | None,
    window_left: int | None,
    block_tokens: int,
) -> None:
    """Write attention of new tokens into `out` and `lse`; arguments are those of `foscar.extend_attention`."""
    bounds = read_bounds(cu_seqlens, "q", q.shape[0])
    states, visible, page_rows = read_tables(pages, lengths, block_table, seq_lens, seq_ids, spec, 0, window_left)
    layout = record_layout(spec, pages.device)
    for state, positions, page_ids, (begin, end) in zip(states, visible, page_rows, bounds, strict=True):
        if begin == end:
            continue
        query = _query(q[begin:end], state.length, spec, sm_scale, softcap, window_left)
        cached = _attend_cache(query, pages, exact, state, positions, page_ids, layout, block_tokens // PAGE_SIZE)
        new = _attend_new(query, k[begin:end], v[begin:end], state.length, block_tokens)
        _finish(itertools.chain(cached, new), query, sinks, out[begin:end], lse[begin:end])


def _query(
    q: torch.Tensor, first: int, spec: CacheSpec, sm_scale: float, softcap: float | None, window_left: int | None
) -> _Query:
    """Query tokens ``[q_len, num_q_heads, head_dim]``, the first of them at a position."""
    group = q.shape[1] // spec.num_kv_heads
    rows = q.float().unflatten(1, (spec.num_kv_heads, group)).transpose(0, 1).flatten(1, 2)
    position = torch.arange(first, first + q.shape[0], device=q.device).repeat_interleave(group)
    return _Query(rows, position, sm_scale, softcap, window_left)


def _attend_cache(
    query: _Query,
    pages: torch.Tensor,
    exact: torch.Tensor,
    state: SequenceState,
    positions: range,
    page_ids: list[int],
    layout: RecordLayout,
    pages_per_step: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Attend to the exact tokens of a sequence, then to those in pages at `positions`, some pages at a time."""
    for tier, slots in state.exact_tiers():
        if slots:
            yield _attend_exact(query, exact[state.seq_id][:, :, slots], tier)
    for i in range(0, len(page_ids), pages_per_step):
        records = pages[page_ids[i : i + pages_per_step]].transpose(0, 1)
        start = (positions.start // PAGE_SIZE + i) * PAGE_SIZE
        yield _attend_pages(query, records, start, state, layout)


def _attend_new(
    query: _Query, k: torch.Tensor, v: torch.Tensor, first: int, block_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Attend to new tokens ``[tokens, num_kv_heads, head_dim]``, the first of them at a position, a block at a time."""
    for i in range(0, k.shape[0], block_tokens):
        block = torch.stack([k[i : i + block_tokens], v[i : i + block_tokens]]).permute(2, 0, 1, 3)
        yield _attend_exact(query, block, range(first + i, first + i + block.shape[2]))


def _finish(
    parts: Iterator[tuple[torch.Tensor, torch.Tensor]],
    query: _Query,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge parts as they come, and write them to `out` ``[q_len, num_q_heads, head_dim]`` and `lse`."""
    rows = query.rows
    row_out, row_lse = torch.zeros_like(rows), rows.new_full(rows.shape[:2], -torch.inf)
    for part_out, part_lse in parts:
        row_out, row_lse = merge_states([row_out, part_out], [row_lse, part_lse])
    row_out = row_out.unflatten(1, (out.shape[0], -1)).transpose(0, 1).flatten(1, 2)
    row_lse = row_lse.unflatten(1, (out.shape[0], -1)).transpose(0, 1).flatten(1, 2)
    if sinks is not None:
        row_out, row_lse = _add_sinks(row_out, row_lse, sinks.float())
    out.copy_(row_out)
    lse.copy_(row_lse)


def read_tables(
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    spec: CacheSpec,
    q_len: int,
    window_left: int | None,
) -> tuple[list[SequenceState], list[range], list[list[int]]]:
    """Fetch where sequences' tokens are, which of those in pages can be seen, and the pages; check all values."""
    states = read_states(spec, lengths, seq_lens, seq_ids)
    first = [0 if window_left is None else max(s.length - q_len - window_left, 0) for s in states]
    visible = [range(max(s.paged.start, f), s.paged.stop) for s, f in zip(states, first, strict=True)]
    return states, visible, read_block_table(pages, block_table, visible)


def _attend_exact(query: _Query, tokens: torch.Tensor, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to unquantised tokens ``[num_kv_heads, 2, tokens, head_dim]``."""
    k, v = tokens.float().unbind(1)
    key = torch.arange(positions.start, positions.stop, device=k.device)
    p, total, lse = _softmax(query, query.rows @ k.transpose(1, 2), key, torch.ones_like(key, dtype=torch.bool))
    return p @ v / total, lse


def _attend_pages(
    query: _Query, records: torch.Tensor, start: int, state: SequenceState, layout: RecordLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to consecutive records ``[num_kv_heads, pages, record_bytes]``, whose first token is at `start`."""
    key = torch.arange(start, start + records.shape[1] * PAGE_SIZE, device=records.device)
    is_token = (key >= state.paged.start) & (key < state.paged.stop)
    dots = _fold_k(query.rows, records, layout.k, is_token)
    p, total, lse = _softmax(query, dots, key, is_token)
    return _fold_v(p, records, layout.v, is_token) / total, lse


def _softmax(
    query: _Query, dots: torch.Tensor, key: torch.Tensor, is_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn q·k ``[num_kv_heads, rows, tokens]`` into exponentials, their sum (never 0) and its logarithm."""
    scores = dots * query.sm_scale
    if query.softcap is not None:
        scores = query.softcap * torch.tanh(scores / query.softcap)
    position = query.position[:, None]
    visible = is_token & (key <= position)
    if query.window_left is not None:
        visible = visible & (key >= position - query.window_left)
    scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    total = p.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return p, total.masked_fill(total == 0, 1), lse


def _fold_k(rows: torch.Tensor, records: torch.Tensor, k: OperandLayout, is_token: torch.Tensor) -> torch.Tensor:
    """q·k of packed keys, ``[num_kv_heads, rows, tokens]``."""
    codes = read_codes(records, k).float()  # [num_kv_heads, pages, 64, head_dim]
    dots: torch.Tensor
    if k.quant.axis == "channel":
        scale, offset = read_params(records, k)
        q_scaled = rows[:, None] * scale[:, :, None]
        q_offset = torch.einsum("hrd,hnd->hnr", rows, offset)
        dots = (q_scaled @ codes.transpose(2, 3) + q_offset[..., None]).transpose(1, 2).flatten(2)
    else:
        scale, offset = _token_params(records, k, is_token)
        q_groups = rows.unflatten(-1, (-1, k.quant.group_size))
        code_groups = codes.flatten(1, 2).unflatten(-1, (-1, k.quant.group_size))
        products = torch.einsum("hrgd,htgd->hrtg", q_groups, code_groups)
        dots = (scale * products + offset * q_groups.sum(-1)[:, :, None]).sum(-1)
    return dots


def _fold_v(p: torch.Tensor, records: torch.Tensor, v: OperandLayout, is_token: torch.Tensor) -> torch.Tensor:
    """p·v of packed values, ``[num_kv_heads, rows, head_dim]``."""
    codes = read_codes(records, v).float()
    out: torch.Tensor
    if v.quant.axis == "channel":
        scale, offset = read_params(records, v)
        p_pages = p.unflatten(-1, (-1, PAGE_SIZE)).transpose(1, 2)  # [num_kv_heads, pages, rows, 64]
        products = p_pages @ codes
        out = (scale[:, :, None] * products + offset[:, :, None] * p_pages.sum(-1, keepdim=True)).sum(1)
    else:
        scale, offset = _token_params(records, v, is_token)
        code_groups = codes.flatten(1, 2).unflatten(-1, (-1, v.quant.group_size))
        products = torch.einsum("hrtg,htgd->hrgd", p[..., None] * scale, code_groups)
        out = (products + (p[..., None] * offset).sum(2)[..., None]).flatten(2)
    return out


def _token_params(
    records: torch.Tensor, operand: OperandLayout, is_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets ``[num_kv_heads, 1, tokens, groups]``; 0 for absent tokens, whose bytes may be NaN."""
    scale, offset = (x.flatten(1, 2).masked_fill(~is_token[:, None], 0) for x in read_params(records, operand))
    return scale[:, None], offset[:, None]


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let each head's sink logit into the denominator; a row without keys stays empty."""
    total = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sinks))
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0))
    return out * weight[..., None], total
