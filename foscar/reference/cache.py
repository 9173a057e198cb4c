"""Appending to a cache and reading it back.

A sequence's tokens live in up to three tiers. Its first `sink_tokens` and its last few are kept as they came, in rows
of `window`: first the sinks, then a ring in which the token at position p has slot ``p % ring_tokens``. All others are
in pages. `quantized_len` says where the ring begins: tokens before it have left the recent window. A token is
quantised once, by the append that moves this border past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foscar._checks import require
from foscar.layout import PAGE_SIZE, CacheSpec, OperandLayout, QuantSpec, record_layout
from foscar.reference.quant import check_finite, quantize
from foscar.reference.records import read_codes, read_params, write_channel_params, write_tokens


@dataclass(frozen=True)
class SequenceState:
    """Where the tokens of one sequence of a batch are, in host integers.

    Attributes
    ----------
    batch, seq_id : int
        Its row of the batch and of the window.
    length : int
        Tokens in it.
    quantized : int
        Where the ring begins.
    """

    spec: CacheSpec
    batch: int
    seq_id: int
    length: int
    quantized: int

    @property
    def sinks(self) -> int:
        """Tokens in the sink rows."""
        return min(self.spec.sink_tokens, self.length)

    @property
    def ring_start(self) -> int:
        """First token in the ring; those between the sinks and it are in pages."""
        return max(self.sinks, self.quantized)

    def page_range(self, first_visible: int = 0) -> tuple[int, int]:
        """Columns of the block table that hold tokens, those before `first_visible` left out; start and stop."""
        first = max(self.sinks, first_visible)
        if self.quantized <= first:
            return 0, 0
        return first // PAGE_SIZE, -(-self.quantized // PAGE_SIZE)

    def window_tiers(self) -> tuple[tuple[range, list[int]], tuple[range, list[int]]]:
        """Positions, and the window's rows that hold them, of the sinks and of the ring."""
        sinks, ring = range(self.sinks), range(self.ring_start, self.length)
        return (sinks, list(sinks)), (ring, ring_rows(self.spec, ring))


def ring_rows(spec: CacheSpec, positions: range) -> list[int]:
    """Rows of a window that are the ring's slots for tokens at `positions`."""
    return [spec.sink_tokens + position % spec.ring_tokens for position in positions]


def read_states(
    spec: CacheSpec,
    window: torch.Tensor,
    quantized_len: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
) -> list[SequenceState]:
    """Fetch lengths, check that so many tokens can have been appended, and work out where they are."""
    lengths = seq_lens.tolist()
    for b, length in enumerate(lengths):
        require(length >= 0, f"seq_lens[{b}]", length, "must not be negative")
    if not spec.window_tokens:
        return [SequenceState(spec, b, b, length, length) for b, length in enumerate(lengths)]
    max_seqs = quantized_len.shape[0]
    ids = list(range(len(lengths))) if seq_ids is None else seq_ids.tolist()
    for b, seq_id in enumerate(ids):
        require(0 <= seq_id < max_seqs, f"seq_ids[{b}]", seq_id, f"must be in [0, {max_seqs}), the cache's max_seqs")
    quantized = quantized_len.tolist()
    states = []
    for b, (seq_id, length) in enumerate(zip(ids, lengths, strict=True)):
        state = SequenceState(spec, b, seq_id, length, min(quantized[seq_id], length))
        most = state.ring_start + spec.ring_tokens if window.numel() else 0
        require(length <= most, f"seq_lens[{b}]", length, f"must not exceed the tokens appended for seq_id {seq_id}")
        states.append(state)
    return states


def read_block_table(
    pages: torch.Tensor, block_table: torch.Tensor, ranges: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Fetch the page ids in each row's range of columns, and check them; other entries may be anything."""
    (num_pages, *_), width = pages.shape, block_table.shape[1]
    rows = []
    for b, (first, last) in enumerate(ranges):
        require(last <= width, "block_table.shape", list(block_table.shape), f"row {b} needs {last} columns")
        rows.append(block_table[b, first:last].tolist())
        for column, page in enumerate(rows[-1], first):
            require(0 <= page < num_pages, f"block_table[{b}, {column}]", page, f"must be in [0, {num_pages})")
    return rows


def append(
    pages: torch.Tensor,
    window: torch.Tensor,
    quantized_len: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    spec: CacheSpec,
) -> None:
    """Append tokens; arguments are those of `foscar.append` and the tensors of a cache. Errors change nothing."""
    bounds = cu_seqlens.tolist()
    require(bounds[0] == 0, "cu_seqlens[0]", bounds[0], "must be 0")
    require(bounds[-1] == k.shape[0], "cu_seqlens[-1]", bounds[-1], f"must be the number of tokens in k, {k.shape[0]}")
    for b in range(1, len(bounds)):
        require(bounds[b - 1] <= bounds[b], f"cu_seqlens[{b}]", bounds[b], f"must be at least {bounds[b - 1]}")
    states = read_states(spec, window, quantized_len, seq_lens, seq_ids)
    moves = [_Move.plan(s, bounds[s.batch], bounds[s.batch + 1]) for s in states]
    page_rows = read_block_table(pages, block_table, [m.page_range for m in moves])
    if spec.window_tokens:
        _check_distinct("seq_ids", [[m.state.seq_id] for m in moves if m.stop > m.start])
    _check_distinct("block_table", page_rows)
    check_finite("k", k)
    check_finite("v", v)

    # All reads come before the first write, because ring slots are used again.
    leaving = torch.cat([m.gather(window, k, v) for m in moves])
    page = torch.cat([_at_tokens(row, m) for row, m in zip(page_rows, moves, strict=True)]).to(k.device)
    token = torch.cat([torch.arange(m.first, m.last) % PAGE_SIZE for m in moves]).to(k.device)
    layout = record_layout(spec, k.device)
    if len(token):
        _write(pages, page, token, leaving[:, 0], layout.k)
        _write(pages, page, token, leaving[:, 1], layout.v)
    if spec.window_tokens:
        for m in moves:
            m.store(window, k, v)
            quantized_len[m.state.seq_id] = m.quantized


@dataclass(frozen=True)
class _Move:
    """What an append does to one sequence: tokens ``[first, last)`` go to pages, later ones to the window."""

    state: SequenceState  # before the append
    start: int  # the new tokens' rows of k and v
    stop: int
    first: int
    last: int
    quantized: int  # after the append

    @staticmethod
    def plan(state: SequenceState, start: int, stop: int) -> _Move:
        spec, quantized = state.spec, state.quantized
        if start == stop:
            return _Move(state, start, stop, quantized, quantized, quantized)
        if spec.block_wise and quantized % PAGE_SIZE:
            rule = f"must be a multiple of {PAGE_SIZE} to append where blocks of {PAGE_SIZE} tokens are quantised"
            require(state.length <= spec.sink_tokens, f"seq_lens[{state.batch}]", state.length, rule)
            quantized -= quantized % PAGE_SIZE
        length = state.length + stop - start
        after = max(quantized, spec.quantized_len(length))
        first = max(quantized, min(spec.sink_tokens, length))
        return _Move(state, start, stop, first, max(first, after), after)

    @property
    def page_range(self) -> tuple[int, int]:
        """Columns of the block table that are written; start and stop."""
        if self.first == self.last:
            return 0, 0
        return self.first // PAGE_SIZE, -(-self.last // PAGE_SIZE)

    def gather(self, window: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Tokens ``[first, last)`` as ``[tokens, 2, num_kv_heads, head_dim]``, from the ring and from the new ones."""
        new = torch.stack([self._new(x, range(self.first, self.last)) for x in (k, v)], 1)
        waiting = range(self.first, min(self.last, self.state.length))
        if not waiting:
            return new
        rows = ring_rows(self.state.spec, waiting)
        return torch.cat([window[self.state.seq_id][:, :, rows].permute(2, 1, 0, 3), new])

    def store(self, window: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the new tokens that stay in the window into its rows."""
        spec, length = self.state.spec, self.state.length + self.stop - self.start
        sinks = range(self.state.length, min(spec.sink_tokens, length))
        ring = range(max(self.state.length, spec.sink_tokens, self.quantized), length)
        for positions, rows in ((sinks, list(sinks)), (ring, ring_rows(spec, ring))):
            if rows:
                tokens = torch.stack([self._new(x, positions) for x in (k, v)], 1)
                window[self.state.seq_id, :, :, rows] = tokens.permute(2, 1, 0, 3)

    def _new(self, x: torch.Tensor, positions: range) -> torch.Tensor:
        """Rows of k or v that are new tokens at `positions`; earlier ones are left out."""
        shift = self.start - self.state.length
        return x[max(positions.start + shift, self.start) : max(positions.stop + shift, self.start)]


def _at_tokens(page_row: list[int], move: _Move) -> torch.Tensor:
    """Return the page of each token that a move writes."""
    pages = torch.tensor(page_row, dtype=torch.int64).repeat_interleave(PAGE_SIZE)
    return pages[move.first % PAGE_SIZE :][: move.last - move.first]


def _check_distinct(name: str, rows: list[list[int]]) -> None:
    seen: set[int] = set()
    for row in rows:
        shared = sorted(seen.intersection(row))
        require(not shared, name, shared, "must not be written by two sequences of one append")
        seen.update(row)


def _write(
    pages: torch.Tensor, page: torch.Tensor, token: torch.Tensor, x: torch.Tensor, operand: OperandLayout
) -> None:
    """Quantise tokens x ``[n, num_kv_heads, head_dim]`` and write them at their places."""
    if operand.quant.axis == "token":
        codes, words = quantize(x, operand.quant)
        write_tokens(pages, page, token, codes, words, operand)
    else:
        codes, words = _quantize_blocks(x, token, operand.quant)
        write_tokens(pages, page, token, codes, None, operand)
        write_channel_params(pages, page[token == PAGE_SIZE - 1], words, operand)


def _quantize_blocks(x: torch.Tensor, token: torch.Tensor, quant: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise whole blocks channel-wise. A block that begins with sinks lacks them: its first token stands in."""
    starts = torch.cat([(token == PAGE_SIZE - 1).new_ones(1), token[:-1] == PAGE_SIZE - 1])
    repeats = torch.where(starts, token + 1, 1)
    blocks = x.repeat_interleave(repeats, 0).unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2)
    codes, words = quantize(blocks, quant)  # [blocks, num_kv_heads, 64, head_dim]
    last_copies = repeats.cumsum(0) - 1
    return codes.transpose(1, 2).flatten(0, 1)[last_copies], words


def dequantize(
    pages: torch.Tensor,
    window: torch.Tensor,
    quantized_len: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    spec: CacheSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, float32 ``[total_tokens, num_kv_heads, head_dim]``."""
    states = read_states(spec, window, quantized_len, seq_lens, seq_ids)
    page_rows = read_block_table(pages, block_table, [s.page_range() for s in states])
    layout = record_layout(spec, pages.device)
    k_hat: list[torch.Tensor] = []
    v_hat: list[torch.Tensor] = []
    for state, row in zip(states, page_rows, strict=True):
        (_, sink_rows), (_, ring) = state.window_tiers()
        first = state.sinks % PAGE_SIZE
        for index, operand, tokens in ((0, layout.k, k_hat), (1, layout.v, v_hat)):
            tokens.append(_read_window(window, state.seq_id, index, sink_rows))
            tokens.append(_dequantize_records(pages[row], operand)[first:][: state.quantized - state.sinks])
            tokens.append(_read_window(window, state.seq_id, index, ring))
    return torch.cat(k_hat), torch.cat(v_hat)


def _read_window(window: torch.Tensor, seq_id: int, index: int, rows: list[int]) -> torch.Tensor:
    """Keys (index 0) or values (1) of rows of a window, float32 ``[rows, num_kv_heads, head_dim]``."""
    if not rows:
        return torch.empty(0, window.shape[1], window.shape[4], device=window.device)
    return window[seq_id, :, index, rows].transpose(0, 1).float()


def _dequantize_records(records: torch.Tensor, operand: OperandLayout) -> torch.Tensor:
    """Values ``[pages * 64, num_kv_heads, head_dim]`` of records ``[pages, num_kv_heads, record_bytes]``."""
    codes = read_codes(records, operand).double()
    scale, offset = read_params(records, operand)
    if operand.quant.axis == "token":
        groups = codes.unflatten(-1, (-1, operand.quant.group_size))
        values: torch.Tensor = (scale.double()[..., None] * groups + offset.double()[..., None]).flatten(-2)
    else:
        values = scale.double()[:, :, None] * codes + offset.double()[:, :, None]
    return values.float().transpose(1, 2).flatten(0, 1)
