"""What it costs to append: a token of each sequence, as decoding does, and whole prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

from foscar.bench.grid import SCHEMES
from foscar.bench.run import environment
from foscar.bench.timing import WrongOutputError, capture, copy_ceiling, median_us, memory_returned
from foscar.bench.workload import num_layers
from foscar.cache import PagedKVCache, append
from foscar.layout import PAGE_SIZE, CacheSpec, QuantSpec
from foscar.reference import cache as reference

_KV_HEADS, _HEAD_DIM = 8, 128
_DECODED = 1000  # tokens of a sequence before one more
_CALLS = 32
# sequences, tokens of each before, new ones of each
SHAPES = [*((batch, _DECODED, 1) for batch in (1, 16, 64, 256)), (1, 0, 2048), (1, 0, 16384), (16, 0, 2048)]


def _quantized(bits: int, num_kv_heads: int, head_dim: int, **options: float | bool) -> CacheSpec:
    quant = QuantSpec(bits, **options)  # type: ignore[arg-type]
    return CacheSpec(quant, quant, num_kv_heads, head_dim)


RECIPES: dict[str, Callable[..., CacheSpec]] = {
    **SCHEMES,
    "token-wise, Hadamard": partial(_quantized, hadamard=True),
    "token-wise, clipped": partial(_quantized, clip=0.96),
}


@dataclass(frozen=True)
class Case:
    """Tokens to append, and how they are stored.

    Attributes
    ----------
    scheme : str
        One of `RECIPES`.
    bits : int
        Of K and of V.
    batch, seq_len, new_tokens : int
        Sequences; tokens of the first before, where each other has one more than the one before it, up to 63, over and
        over, unless there are none; new ones of each.
    """

    scheme: str
    bits: int
    batch: int
    seq_len: int
    new_tokens: int

    @property
    def spec(self) -> CacheSpec:
        """The cache's formats and shapes."""
        return RECIPES[self.scheme](self.bits, _KV_HEADS, _HEAD_DIM)

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence before."""
        return [self.seq_len + b % PAGE_SIZE if self.seq_len else 0 for b in range(self.batch)]

    @property
    def nbytes(self) -> int:
        """Bytes that a call cannot do without: K and V in bfloat16 are read, and their part of a page is written."""
        read = 2 * 2 * _HEAD_DIM
        return self.batch * self.new_tokens * _KV_HEADS * (read + self.spec.record_bytes // PAGE_SIZE)

    def __str__(self) -> str:
        return f"{self.batch} x {self.new_tokens} after {self.seq_len}, INT{self.bits} {self.scheme}"


@dataclass(frozen=True)
class Row:
    """One line of the CSV file.

    Attributes
    ----------
    num_kv_heads, head_dim, batch, seq_len, new_tokens, scheme, k_bits, v_bits, spec
        The `Case`; `spec` is ``str(CacheSpec)``.
    us : float
        Microseconds of a call, the median, in a graph of calls that each write to another cache.
    gbps, copy_gbps, share
        The case's bytes per time, and what a copy reads and writes in the same run, in GB/s; their ratio.
    flashinfer_bf16_us
        FlashInfer's append to pages of BF16.
    gpu, driver, cuda, torch, foscar, flashinfer, commit
        Where, and with what.
    """

    num_kv_heads: int
    head_dim: int
    batch: int
    seq_len: int
    new_tokens: int
    scheme: str
    k_bits: int
    v_bits: int
    spec: str
    us: float
    gbps: float
    copy_gbps: float
    share: float
    flashinfer_bf16_us: float | None
    gpu: str
    driver: str
    cuda: str
    torch: str
    foscar: str
    flashinfer: str
    commit: str


def cases(bits: list[int]) -> Iterator[Case]:
    """Yield every recipe with 2 bits, and the plainest with 4, at each shape."""
    for scheme, b in [("token-wise", 2), ("token-wise", 4), *((name, 2) for name in [*RECIPES][1:])]:
        if b in bits:
            yield from (Case(scheme, b, *shape) for shape in SHAPES)


class Appends:
    """Caches that a graph appends to one after another, from the same state whenever it is replayed."""

    def __init__(self, case: Case, device: torch.device) -> None:
        spec, batch = case.spec, case.batch
        int32 = partial(torch.tensor, dtype=torch.int32, device=device)
        columns = -(-(max(case.seq_lens) + case.new_tokens) // PAGE_SIZE)
        self.case = case
        self.seq_lens = int32(case.seq_lens)
        self.ends = int32(range(0, (batch + 1) * case.new_tokens, case.new_tokens))
        self.table = torch.randperm(batch * columns, device=device).int().view(batch, columns)
        copies = num_layers(case.nbytes, device) if case.seq_len == 0 else _CALLS
        shape = (copies, 2, batch * case.new_tokens, _KV_HEADS, _HEAD_DIM)
        self.kv = torch.randn(shape, device=device).bfloat16()
        self.caches = [PagedKVCache(spec, batch * columns, device, torch.bfloat16, batch) for _ in range(copies)]
        # Of all caches in one tensor, so that one copy brings all rings back to where they were.
        state = [[spec.quantized_len(length), length] for length in case.seq_lens] if spec.exact_tokens else []
        self._state = int32(state).view(-1, 2)
        self._lengths = self._state.repeat(copies, 1, 1)
        for cache, lengths in zip(self.caches, self._lengths, strict=True):
            cache.exact.normal_()
            cache.lengths = lengths

    def rewind(self) -> None:
        """Forget what was appended."""
        self._lengths.copy_(self._state)

    @property
    def calls(self) -> list[Callable[[], object]]:
        """What a graph is made of."""
        calls = [
            partial(append, cache, k, v, self.table, self.seq_lens, self.ends)
            for cache, (k, v) in zip(self.caches, self.kv, strict=True)
        ]
        return [self.rewind, *calls] if len(self._state) else [*calls]

    def check(self) -> None:
        """Compare what the last call left of the last sequence with what PyTorch makes of it.

        Raises
        ------
        WrongOutputError
            If it differs; where tokens are rotated, in more than a hundredth of its bytes.
        """
        case, cache = self.case, self.caches[-1]
        spec, b = case.spec, case.batch - 1
        pages, exact = torch.zeros_like(cache.pages), cache.exact.clone()
        state = self._state.clone()
        k, v = self.kv[-1, :, b * case.new_tokens :]
        rows = (self.table[b:], self.seq_lens[b:], self.ends[:2], self.ends.new_tensor([b]))
        reference.append(pages, exact, state, k, v, *rows, None, True, None, None, spec)
        held, wanted = cache.pages[self.table[b].long()], pages[self.table[b].long()]
        equal = (held == wanted).float().mean().item()
        least = 0.99 if spec.k.hadamard else 1.0
        if equal < least or not torch.equal(cache.exact, exact) or not torch.equal(cache.lengths[-1:], state[-1:]):
            raise WrongOutputError(f"{equal:.2%} of the bytes are those of the reference: not timed")


def measure(case: Case, device: torch.device, with_peers: bool, log: Callable[[str], None]) -> Row:
    """Check, then time.

    Raises
    ------
    WrongOutputError
        If what is appended is not what the reference appends.
    """
    with memory_returned():
        appends = Appends(case, device)
        appends.calls[-1]()  # compiles: the first call may be the copy of lengths
        graph = capture(appends.calls)
        graph.replay()
        appends.check()
        us = median_us(graph) / len(appends.caches)
        peer = None
        if with_peers:
            try:
                peer = _flashinfer_us(appends)
            except Exception as problem:  # whatever a peer does not support must not end the run
                log(f"{case}, FlashInfer: {type(problem).__name__}: {str(problem)[:200]}")
    spec, gbps, copy_gbps = case.spec, case.nbytes / us / 1e3, copy_ceiling(device)
    return Row(
        _KV_HEADS,
        _HEAD_DIM,
        case.batch,
        case.seq_len,
        case.new_tokens,
        case.scheme,
        spec.k.bits,
        spec.v.bits,
        str(spec),
        us,
        gbps,
        copy_gbps,
        gbps / copy_gbps,
        peer,
        **environment(device),
    )


def _flashinfer_us(appends: Appends) -> float:
    """Time FlashInfer's append of the same tokens to BF16 pages."""
    from flashinfer.page import append_paged_kv_cache

    case, table = appends.case, appends.table
    shape = (table.numel(), 2, PAGE_SIZE, _KV_HEADS, _HEAD_DIM)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=table.device) for _ in appends.caches]
    indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=table.device) * table.shape[1]
    rows = torch.arange(case.batch, dtype=torch.int32, device=table.device).repeat_interleave(case.new_tokens)
    new = torch.arange(case.new_tokens, dtype=torch.int32, device=table.device)
    positions = (appends.seq_lens[:, None] + new).flatten()
    last = (appends.seq_lens + case.new_tokens - 1) % PAGE_SIZE + 1
    calls = [
        partial(append_paged_kv_cache, k, v, rows, positions, cache, table.flatten(), indptr, last)
        for cache, (k, v) in zip(caches, appends.kv, strict=True)
    ]
    return median_us(capture(calls)) / len(calls)


def table(rows: list[Row]) -> Table:
    """Lay rows out for a terminal."""
    result = Table(title="append, 8 KV heads of 128")
    for name in ("sequences x new", "after", "recipe", "us", "share of a copy", "FlashInfer BF16 us"):
        result.add_column(name, justify="left" if name == "recipe" else "right")
    for _, group in itertools.groupby(rows, lambda row: (row.scheme, row.k_bits)):
        for row in group:
            peer = "" if row.flashinfer_bf16_us is None else f"{row.flashinfer_bf16_us:.2f}"
            shape = (f"{row.batch} x {row.new_tokens}", str(row.seq_len), f"INT{row.k_bits} {row.scheme}")
            result.add_row(*shape, f"{row.us:.2f}", f"{row.share:.0%}", peer)
        result.add_section()
    return result
