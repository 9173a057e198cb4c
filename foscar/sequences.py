"""Host-side bookkeeping of pages: which sequence owns or shares which."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch

from foscar._checks import require, require_int
from foscar.cache import PagedKVCache, append
from foscar.layout import PAGE_SIZE, pages_of


class OutOfPagesError(RuntimeError):
    """The cache has no free page, or no free row for exact tokens; nothing has changed."""


class Tables(TypedDict):
    """The arguments by which the functions of foscar know sequences."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    seq_ids: torch.Tensor


@dataclass
class _Entry:
    length: int = 0
    quantized: int = 0  # mirrors PagedKVCache.lengths
    pages: list[int] = field(default_factory=list)  # -1 for pages that would hold sinks only


class BlockManager:
    """Gives pages of a cache to sequences, shares them between forks, and takes them back.

    It serves one layer, and a serving engine has its own and needs none of this.

    Parameters
    ----------
    cache : PagedKVCache
        The cache; all its pages are managed from now on.

    Examples
    --------
    >>> import torch, foscar
    >>> spec = foscar.CacheSpec.token_wise(2, num_kv_heads=2, head_dim=64)
    >>> manager = foscar.BlockManager(foscar.PagedKVCache(spec, num_pages=8))
    >>> seq = manager.new()
    >>> manager.append([seq], torch.randn(100, 2, 64), torch.randn(100, 2, 64))
    >>> branch = manager.fork(seq)
    >>> manager.append([branch], torch.randn(1, 2, 64), torch.randn(1, 2, 64))
    >>> manager.length(seq), manager.length(branch)
    (100, 101)
    >>> q = torch.randn(2, 8, 64)
    >>> foscar.decode_attention(q, manager.cache, **manager.tables([seq, branch])).shape
    torch.Size([2, 8, 64])
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self._entries: dict[int, _Entry] = {}
        self._users = [0] * cache.pages.shape[0]
        self._free_pages = list(range(cache.pages.shape[0]))[::-1]
        self._free_ids: list[int] = []
        self._next_id = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence uses."""
        return len(self._free_pages)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence."""
        return self._entry(seq_id).length

    def new(self) -> int:
        """Begin an empty sequence and return its id.

        Raises
        ------
        OutOfPagesError
            If the spec keeps exact tokens and the cache has max_seqs sequences already.
        """
        if self._free_ids:
            seq_id = self._free_ids.pop()
        elif self.cache.spec.exact_tokens and self._next_id == self.cache.max_seqs:
            raise OutOfPagesError(f"max_seqs={self.cache.max_seqs}: every row for exact tokens is in use")
        else:
            seq_id = self._next_id
            self._next_id += 1
        self._entries[seq_id] = _Entry()
        return seq_id

    def fork(self, seq_id: int) -> int:
        """Begin a sequence with the tokens of another, sharing its pages, and return its id.

        A shared page is copied when either of the two is about to write into it.

        Raises
        ------
        OutOfPagesError
            If the spec keeps exact tokens and the cache has max_seqs sequences already.
        """
        entry = self._entry(seq_id)
        fork_id = self.new()
        self._entries[fork_id] = _Entry(entry.length, entry.quantized, list(entry.pages))
        for page in entry.pages:
            if page >= 0:
                self._users[page] += 1
        if self.cache.spec.exact_tokens:
            self.cache.copy_exact(seq_id, fork_id)
        return fork_id

    def reorder(self, seq_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Go on with some of the sequences, each as often as it is named: a step of beam search.

        Parameters
        ----------
        seq_ids : sequence of int
            The sequences so far, each once; those that are no parent end.
        parents : sequence of int
            For each sequence from now on, the one of `seq_ids` that it continues.

        Returns
        -------
        list of int
            Their ids, in the order of `parents`: a parent's own where it is first named, then those of forks.

        Raises
        ------
        ValueError
            If a parent is not one of the sequences.
        OutOfPagesError
            If the spec keeps exact tokens and there are too many sequences for max_seqs; nothing has changed then.
        """
        require(len(set(seq_ids)) == len(seq_ids), "seq_ids", list(seq_ids), "must be distinct")
        for seq_id in seq_ids:
            self._entry(seq_id)
        for parent in parents:
            require(parent in seq_ids, "parents", parent, f"must be one of {list(seq_ids)}")
        ended = [seq_id for seq_id in seq_ids if seq_id not in parents]
        forks = len(parents) - len(set(parents))
        if self.cache.spec.exact_tokens:
            rows = self.cache.max_seqs - len(self._entries) + len(ended)
            if forks > rows:
                raise OutOfPagesError(f"max_seqs={self.cache.max_seqs}: {forks} rows are needed, {rows} are free")
        for seq_id in ended:
            self.free(seq_id)
        return [self.fork(p) if p in parents[:i] else p for i, p in enumerate(parents)]

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop the last tokens of a sequence, the speculated ones for instance.

        Parameters
        ----------
        seq_id : int
            The sequence.
        length : int
            Tokens to keep. With a channel-wise operand it must end in the ring, in the sinks, or at a multiple of 64:
            the other tokens of a quantised block cannot be replaced.

        Raises
        ------
        ValueError
            If length is not one of those.
        """
        entry, spec = self._entry(seq_id), self.cache.spec
        require_int("length", length, 0)
        require(length <= entry.length, "length", length, f"must be at most the sequence's, {entry.length}")
        if spec.block_wise and length < entry.quantized:
            whole = length % PAGE_SIZE == 0 or length <= spec.sink_tokens
            rule = f"must be at least {entry.quantized}, a multiple of {PAGE_SIZE}, or within the sinks"
            require(whole, "length", length, f"{rule}: blocks of {PAGE_SIZE} tokens are quantised together")
        entry.length = length
        entry.quantized = min(entry.quantized, length)
        self._release(entry)

    def free(self, seq_id: int) -> None:
        """End a sequence; pages that no fork shares become free."""
        self._release(self._entry(seq_id), keep=0)
        del self._entries[seq_id]
        self._free_ids.append(seq_id)

    def append(
        self,
        seq_ids: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor,
        num_tokens: Sequence[int] | None = None,
        *,
        cos_sin_cache: torch.Tensor | None = None,
        is_neox: bool = True,
    ) -> None:
        """Append tokens to sequences, giving them pages as needed.

        Parameters
        ----------
        seq_ids : sequence of int
            The sequences, each once.
        k, v : torch.Tensor
            As in `foscar.append`: the new tokens of all sequences one after another.
        num_tokens : sequence of int, optional
            New tokens of each sequence; by default all have as many.
        cos_sin_cache, is_neox
            As in `foscar.append`.

        Raises
        ------
        ValueError
            If an argument does not fit; no token is appended then.
        OutOfPagesError
            If free pages do not suffice; nothing has changed then.
        """
        require(len(seq_ids) > 0, "seq_ids", list(seq_ids), "must name at least one sequence")
        require(len(set(seq_ids)) == len(seq_ids), "seq_ids", list(seq_ids), "must be distinct")
        if num_tokens is None:
            rule = f"must be a multiple of the {len(seq_ids)} sequences if num_tokens is not given"
            require(k.shape[0] % len(seq_ids) == 0, "k.shape[0]", k.shape[0], rule)
            num_tokens = [k.shape[0] // len(seq_ids)] * len(seq_ids)
        rule = f"must be {len(seq_ids)} numbers that add up to the tokens of k, {k.shape[0]}"
        require(len(num_tokens) == len(seq_ids) and sum(num_tokens) == k.shape[0], "num_tokens", list(num_tokens), rule)
        for i, number in enumerate(num_tokens):
            require_int(f"num_tokens[{i}]", number, 0)
        entries = [self._entry(seq_id) for seq_id in seq_ids]
        lengths = [entry.length + new for entry, new in zip(entries, num_tokens, strict=True)]
        self._reserve(entries, lengths)
        ends = self._index([0, *itertools.accumulate(num_tokens)])
        try:
            tables = self.tables(seq_ids)
            append(self.cache, k, v, cu_seqlens=ends, **tables, cos_sin_cache=cos_sin_cache, is_neox=is_neox)
        except ValueError:
            for entry in entries:
                self._release(entry)
            raise
        for entry, length in zip(entries, lengths, strict=True):
            entry.quantized = self._quantized_after(entry, length)
            entry.length = length

    def tables(self, seq_ids: Sequence[int]) -> Tables:
        """Return the arguments by which the functions of foscar know these sequences.

        Parameters
        ----------
        seq_ids : sequence of int
            The sequences.

        Returns
        -------
        block_table : torch.Tensor
            int32 ``[len(seq_ids), max_pages]`` on the cache's device, -1 where a sequence has no page.
        seq_lens, seq_ids : torch.Tensor
            int32 ``[len(seq_ids)]`` each.
        """
        entries = [self._entry(seq_id) for seq_id in seq_ids]
        width = max((len(entry.pages) for entry in entries), default=0)
        rows = [entry.pages + [-1] * (width - len(entry.pages)) for entry in entries]
        return {
            "block_table": self._index([page for row in rows for page in row]).view(len(entries), width),
            "seq_lens": self._index([entry.length for entry in entries]),
            "seq_ids": self._index(seq_ids),
        }

    def _entry(self, seq_id: int) -> _Entry:
        require(seq_id in self._entries, "seq_id", seq_id, f"must be one of {sorted(self._entries)}")
        return self._entries[seq_id]

    def _quantized_after(self, entry: _Entry, length: int) -> int:
        return entry.quantized if length == entry.length else self.cache.spec.quantized_len(length, entry.quantized)

    def _reserve(self, entries: list[_Entry], lengths: list[int]) -> None:
        """Give each sequence pages for its new length, and pages of its own where the append will write."""
        users = list(self._users)
        missing: list[range] = []
        shared: list[list[int]] = []
        for entry, length in zip(entries, lengths, strict=True):
            start = max(entry.quantized, self.cache.spec.sink_tokens)
            written = pages_of(range(start, self._quantized_after(entry, length)))
            have = len(entry.pages)
            missing.append(range(max(written.start, have), written.stop))
            shared.append([])
            for column in range(written.start, min(written.stop, have)):
                if users[entry.pages[column]] > 1:
                    users[entry.pages[column]] -= 1
                    shared[-1].append(column)
        needed = sum(map(len, missing)) + sum(map(len, shared))
        if needed > len(self._free_pages):
            raise OutOfPagesError(f"{needed} pages are needed, {len(self._free_pages)} are free")
        self._users = users
        src, dst = [], []
        for entry, new, columns in zip(entries, missing, shared, strict=True):
            for column in columns:
                src.append(entry.pages[column])
                entry.pages[column] = self._take()
                dst.append(entry.pages[column])
            if new:
                entry.pages += [-1] * (new.start - len(entry.pages))
                entry.pages += [self._take() for _ in new]
        if src:
            self.cache.copy_pages(self._index(src), self._index(dst))

    def _take(self) -> int:
        page = self._free_pages.pop()
        self._users[page] = 1
        return page

    def _release(self, entry: _Entry, keep: int | None = None) -> None:
        """Give up the pages after the first `keep`, by default those without a quantised token."""
        keep = pages_of(range(self.cache.spec.sink_tokens, entry.quantized)).stop if keep is None else keep
        for page in entry.pages[keep:]:
            if page >= 0:
                self._users[page] -= 1
                if self._users[page] == 0:
                    self._free_pages.append(page)
        del entry.pages[keep:]

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.cache.device)
