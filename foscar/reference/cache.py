"""Appending to a cache and reading it back.

A sequence's tokens live in up to three tiers. Its first `sink_tokens` and its last few are kept as they came, in rows
of `exact`: first the sinks, then a ring. All others are in pages. `lengths` says where the ring begins. A token
is quantised once, by the append that moves this border past it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from foscar._checks import refuse, require
from foscar.layout import PAGE_SIZE, CacheSpec, OperandLayout, QuantSpec, pages_of, record_layout
from foscar.reference.quant import check_finite, quantize
from foscar.reference.records import read_codes, read_params, write_channel_params, write_tokens
from foscar.reference.rope import apply_rope
from foscar.rotation import hadamard


@dataclass(frozen=True)
class SequenceState:
    """Where the tokens of one sequence of a batch are, in host integers.

    Attributes
    ----------
    batch, seq_id : int
        Its row of the batch and of `exact`.
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
    def sinks(self) -> range:
        """Tokens in the sink rows."""
        return range(min(self.spec.sink_tokens, self.length))

    @property
    def paged(self) -> range:
        """Tokens in pages."""
        return range(len(self.sinks), max(self.quantized, len(self.sinks)))

    @property
    def ring(self) -> range:
        """Tokens in the ring."""
        return range(self.paged.stop, self.length)

    def exact_tiers(self) -> tuple[tuple[range, list[int]], tuple[range, list[int]]]:
        """Positions of the sinks and of the ring, each with the rows of `exact` that hold them."""
        return (self.sinks, list(self.sinks)), (self.ring, [self.spec.ring_row(p) for p in self.ring])


def read_states(
    spec: CacheSpec,
    lengths: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
) -> list[SequenceState]:
    """Fetch lengths, check that so many tokens have been appended, and work out where they are."""
    wanted = seq_lens.tolist()
    for b, length in enumerate(wanted):
        require(length >= 0, f"seq_lens[{b}]", length, "must not be negative")
    if not spec.exact_tokens:
        return [SequenceState(spec, b, b, length, length) for b, length in enumerate(wanted)]
    max_seqs = lengths.shape[0]
    ids = list(range(len(wanted))) if seq_ids is None else seq_ids.tolist()
    for b, seq_id in enumerate(ids):
        require(0 <= seq_id < max_seqs, f"seq_ids[{b}]", seq_id, f"must be in [0, {max_seqs}), the cache's max_seqs")
    known = lengths.tolist()
    for b, (seq_id, length) in enumerate(zip(ids, wanted, strict=True)):
        rule = f"must not exceed the tokens appended for seq_id {seq_id}, {known[seq_id][1]}"
        require(length <= known[seq_id][1], f"seq_lens[{b}]", length, rule)
    return [
        SequenceState(spec, b, seq_id, length, min(known[seq_id][0], length))
        for b, (seq_id, length) in enumerate(zip(ids, wanted, strict=True))
    ]


def read_bounds(cu_seqlens: torch.Tensor, name: str, tokens: int) -> list[tuple[int, int]]:
    """Fetch where the rows of each sequence begin and end, among all those of a tensor `name`, and check that."""
    bounds = cu_seqlens.tolist()
    require(bounds[0] == 0, "cu_seqlens[0]", bounds[0], "must be 0")
    require(bounds[-1] == tokens, "cu_seqlens[-1]", bounds[-1], f"must be the number of tokens in {name}, {tokens}")
    for b in range(1, len(bounds)):
        require(bounds[b - 1] <= bounds[b], f"cu_seqlens[{b}]", bounds[b], f"must be at least {bounds[b - 1]}")
    return list(itertools.pairwise(bounds))


def read_block_table(pages: torch.Tensor, block_table: torch.Tensor, positions: Sequence[range]) -> list[list[int]]:
    """Fetch the page ids of each sequence's tokens at `positions`, and check them; other entries may be anything."""
    (num_pages, *_), width = pages.shape, block_table.shape[1]
    rows = []
    for b, columns in enumerate(map(pages_of, positions)):
        enough = columns.stop <= width
        require(enough, "block_table.shape", list(block_table.shape), f"row {b} needs {columns.stop} columns")
        rows.append(block_table[b, columns.start : columns.stop].tolist())
        for column, page in zip(columns, rows[-1], strict=True):
            require(0 <= page < num_pages, f"block_table[{b}, {column}]", page, f"must be in [0, {num_pages})")
    return rows


def plan_append(
    pages: torch.Tensor,
    lengths: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
    k_rotation: torch.Tensor | None,
    v_rotation: torch.Tensor | None,
    spec: CacheSpec,
) -> tuple[list[_Move], list[list[int]], torch.Tensor, torch.Tensor]:
    """Fetch what an append goes by and check it.

    Returns what it does to each sequence, in which pages, and keys and values as they are stored.
    """
    bounds = read_bounds(cu_seqlens, "k", k.shape[0])
    states = read_states(spec, lengths, seq_lens, seq_ids)
    moves = [_Move.plan(s, range(*ends)) for s, ends in zip(states, bounds, strict=True)]
    page_rows = read_block_table(pages, block_table, [m.leaving for m in moves])
    if spec.exact_tokens:
        _check_distinct("seq_ids", [[m.state.seq_id] for m in moves if m.rows])
    _check_distinct("block_table", page_rows)
    check_finite("k", k)
    check_finite("v", v)
    if cos_sin_cache is not None:
        shape, positions = list(cos_sin_cache.shape), []
        for b, m in enumerate(moves):
            own = range(m.state.length, m.state.length + len(m.rows))
            fits = not own or own.stop <= shape[0]
            require(fits, "cos_sin_cache.shape", shape, f"sequence {b} needs {own.stop} positions")
            positions.append(torch.arange(own.start, own.stop, device=k.device))
        k = apply_rope(k, torch.cat(positions), cos_sin_cache, is_neox)
        check_finite("k, turned,", k)
    k = _rotate("k", k, spec.k, k_rotation)
    v = _rotate("v", v, spec.v, v_rotation)
    return moves, page_rows, k, v


def _rotate(name: str, x: torch.Tensor, quant: QuantSpec, matrix: torch.Tensor | None) -> torch.Tensor:
    """Rotate tokens by a Hadamard matrix or the one given, which the dtype of x rounds; sums are float32."""
    if quant.hadamard:
        matrix = hadamard(x.shape[-1]).to(x.device)
    elif matrix is not None:
        matrix = matrix.to(x.dtype).float()
    else:
        return x
    x = (x.float() @ matrix.T).to(x.dtype)
    check_finite(f"{name}, rotated,", x)
    return x


def append(
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
    k_rotation: torch.Tensor | None,
    v_rotation: torch.Tensor | None,
    spec: CacheSpec,
) -> None:
    """Append tokens; arguments are those of `foscar.append` and the tensors of a cache. Errors change nothing."""
    rest = (block_table, seq_lens, cu_seqlens, seq_ids, cos_sin_cache, is_neox, k_rotation, v_rotation, spec)
    moves, page_rows, k, v = plan_append(pages, lengths, k, v, *rest)
    # All reads come before the first write, because ring slots are used again.
    leaving = torch.cat([k.new_empty(0, 2, *k.shape[1:]), *(m.gather(exact, k, v) for m in moves)])
    if len(leaving):
        page = torch.cat([_at_tokens(row, m.leaving, k.device) for row, m in zip(page_rows, moves, strict=True)])
        token = torch.cat([torch.arange(m.leaving.start, m.leaving.stop, device=k.device) for m in moves]) % PAGE_SIZE
        layout = record_layout(spec, k.device)
        # Every other token of V counts down, so that sums over tokens of p * scale * code stay small, and lose little.
        _write(pages, page, token, leaving[:, 0], layout.k, None)
        _write(pages, page, token, leaving[:, 1], layout.v, (token % 2 == 1)[:, None, None])
    if spec.exact_tokens:
        for m in moves:
            if m.rows:  # a row without new tokens may be padding, and leaves its sequence as it is
                m.store(exact, k, v)
                after = (m.quantized, m.state.length + len(m.rows))
                lengths[m.state.seq_id] = torch.tensor(after, dtype=torch.int32, device=k.device)


@dataclass(frozen=True)
class _Move:
    """What an append does to one sequence: tokens at positions `leaving` go to pages, later ones stay exact."""

    state: SequenceState  # before the append
    rows: range  # of k and v: the new tokens
    leaving: range
    quantized: int  # after the append

    @staticmethod
    def plan(state: SequenceState, rows: range) -> _Move:
        spec, before = state.spec, state.quantized
        if not rows:
            return _Move(state, rows, range(0), before)
        if spec.block_wise and before % PAGE_SIZE and state.length > spec.sink_tokens:
            rule = f"must be a multiple of {PAGE_SIZE} to append where blocks of {PAGE_SIZE} tokens are quantised"
            refuse(f"seq_lens[{state.batch}]", state.length, rule)
        quantized = spec.quantized_len(state.length + len(rows), before)
        leaving = range(max(before, spec.sink_tokens), quantized)
        return _Move(state, rows, leaving if leaving else range(0), quantized)

    def gather(self, exact: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the leaving tokens, ``[tokens, 2, num_kv_heads, head_dim]``, from the ring and from the new ones."""
        new = torch.stack([self._new(x, self.leaving) for x in (k, v)], 1)
        waiting = range(self.leaving.start, min(self.leaving.stop, self.state.length))
        if not waiting:
            return new
        rows = [self.state.spec.ring_row(p) for p in waiting]
        return torch.cat([exact[self.state.seq_id][:, :, rows].permute(2, 1, 0, 3), new])

    def store(self, exact: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the new tokens that stay exact into their rows."""
        after = replace(self.state, length=self.state.length + len(self.rows), quantized=self.quantized)
        for positions, rows in after.exact_tiers():
            tokens = torch.stack([self._new(x, positions) for x in (k, v)], 1)
            if len(tokens):
                exact[self.state.seq_id, :, :, rows[-len(tokens) :]] = tokens.permute(2, 1, 0, 3)

    def _new(self, x: torch.Tensor, positions: range) -> torch.Tensor:
        """Rows of k or v that are new tokens at `positions`; earlier ones are left out."""
        shift = self.rows.start - self.state.length
        return x[max(positions.start + shift, self.rows.start) : max(positions.stop + shift, self.rows.start)]


def _at_tokens(page_row: list[int], positions: range, device: torch.device) -> torch.Tensor:
    """Return the page of each token, given those of the columns that `positions` touch."""
    pages = torch.tensor(page_row, dtype=torch.int64, device=device).repeat_interleave(PAGE_SIZE)
    return pages[positions.start % PAGE_SIZE :][: len(positions)]


def _check_distinct(name: str, rows: list[list[int]]) -> None:
    seen: set[int] = set()
    for value in itertools.chain.from_iterable(rows):
        require(value not in seen, name, value, "must not be written twice by one append")
        seen.add(value)


def _write(
    pages: torch.Tensor,
    page: torch.Tensor,
    token: torch.Tensor,
    x: torch.Tensor,
    operand: OperandLayout,
    descending: torch.Tensor | None,
) -> None:
    """Quantise tokens x ``[n, num_kv_heads, head_dim]`` and write them at their places."""
    if operand.quant.axis == "token":
        codes, words = quantize(x, operand.quant, descending)
        write_tokens(pages, page, token, codes, words, operand)
    else:
        codes, words = _quantize_blocks(x, token, operand.quant)
        write_tokens(pages, page, token, codes, None, operand)
        write_channel_params(pages, page[token == PAGE_SIZE - 1], words, operand)


def _quantize_blocks(x: torch.Tensor, token: torch.Tensor, quant: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks channel-wise. One that begins with sinks lacks them: its other tokens stand in, over and over."""
    is_first = torch.cat([token.new_ones(1, dtype=torch.bool), token[:-1] == PAGE_SIZE - 1])
    first = is_first.nonzero()
    missing = token[first]
    place = torch.arange(PAGE_SIZE, device=x.device)
    is_token = place >= missing
    blocks = x[first + torch.where(is_token, place - missing, place % (PAGE_SIZE - missing))]
    codes, words = quantize(blocks.transpose(1, 2), quant)  # [blocks, num_kv_heads, 64, head_dim]
    return codes.transpose(1, 2)[is_token], words


def dequantize(
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    spec: CacheSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, float32 ``[total_tokens, num_kv_heads, head_dim]``."""
    states = read_states(spec, lengths, seq_lens, seq_ids)
    page_rows = read_block_table(pages, block_table, [s.paged for s in states])
    layout = record_layout(spec, pages.device)
    empty = torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=torch.float32, device=pages.device)
    k_hat, v_hat = [empty], [empty]
    for state, row in zip(states, page_rows, strict=True):
        (_, sink_rows), (_, ring_rows) = state.exact_tiers()
        for index, operand, tokens in ((0, layout.k, k_hat), (1, layout.v, v_hat)):
            tokens.append(_read_exact(exact, state.seq_id, index, sink_rows))
            tokens.append(_dequantize_records(pages[row], operand)[state.paged.start % PAGE_SIZE :][: len(state.paged)])
            tokens.append(_read_exact(exact, state.seq_id, index, ring_rows))
    return torch.cat(k_hat), torch.cat(v_hat)


def _read_exact(exact: torch.Tensor, seq_id: int, index: int, rows: list[int]) -> torch.Tensor:
    """Keys (index 0) or values (1) of rows of a exact, float32 ``[rows, num_kv_heads, head_dim]``."""
    if not rows:
        return torch.empty(0, exact.shape[1], exact.shape[4], dtype=torch.float32, device=exact.device)
    return exact[seq_id, :, index, rows].transpose(0, 1).float()


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
