"""How fast new tokens attend to a quantised beginning and to one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

from foscar.attention import extend_attention
from foscar.bench.grid import SCHEMES, Point
from foscar.bench.run import environment
from foscar.bench.timing import WrongOutputError, capture, median_us, memory_returned
from foscar.bench.workload import exact_attention, fill, page_tables, sample_pages
from foscar.cache import PagedKVCache, dequantize
from foscar.layout import PAGE_SIZE, CacheSpec

_Q_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_TOLERANCE = 1e-2  # probabilities are rounded to bfloat16
_WORKSPACE_BYTES = 512 << 20
# sequences, cached tokens of each, new ones of each
SHAPES = [
    (1, 0, 4096),
    (1, 32768, 4096),
    (1, 32768, 512),
    (1, 32768, 16),
    (16, 4096, 16),
    (8, 8192, 1024),
]
RECIPES = [("token-wise", 2), ("token-wise", 4), ("channel-wise K + windows", 2)]


@dataclass(frozen=True)
class Case:
    """New tokens, and how those before them are stored.

    Attributes
    ----------
    scheme : str
        One of `SCHEMES`.
    bits : int
        Of K and of V.
    batch, seq_len, new_tokens : int
        Sequences; cached tokens of each; new ones of each.
    """

    scheme: str
    bits: int
    batch: int
    seq_len: int
    new_tokens: int

    @property
    def spec(self) -> CacheSpec:
        """The cache's formats and shapes."""
        return SCHEMES[self.scheme](self.bits, _KV_HEADS, _HEAD_DIM)

    @property
    def flops(self) -> float:
        """Additions and multiplications of both products: each new token sees all cached ones, and half of the new."""
        new = self.new_tokens
        return 4 * _HEAD_DIM * _Q_HEADS * self.batch * (new * self.seq_len + new * (new + 1) / 2)

    def __str__(self) -> str:
        return f"{self.batch} x {self.new_tokens} after {self.seq_len}, INT{self.bits} {self.scheme}"


@dataclass(frozen=True)
class Row:
    """One line of the CSV file.

    Attributes
    ----------
    num_q_heads, num_kv_heads, head_dim, batch, seq_len, new_tokens, scheme, k_bits, v_bits, spec
        The `Case`; `spec` is ``str(CacheSpec)``.
    us : float
        Microseconds of a call, the median, in a CUDA graph.
    tflops : float
        The case's operations per time, in TFLOP/s.
    relative_error : float
        Of some rows of the output, against float64 attention to keys and values in bfloat16, to which the kernel
        rounds them, too.
    fa2_bf16_us, fa3_bf16_us
        FlashInfer's prefill over pages of BF16 that hold all tokens: its kernel for any GPU, and that for Hopper.
    gpu, driver, cuda, torch, foscar, flashinfer, commit
        Where, and with what.
    """

    num_q_heads: int
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
    tflops: float
    relative_error: float
    fa2_bf16_us: float | None
    fa3_bf16_us: float | None
    gpu: str
    driver: str
    cuda: str
    torch: str
    foscar: str
    flashinfer: str
    commit: str


def cases(bits: list[int]) -> Iterator[Case]:
    """Yield the recipes of each shape together."""
    for shape in SHAPES:
        yield from (Case(scheme, b, *shape) for scheme, b in RECIPES if b in bits)


class Extension:
    """A cache with random tokens in it, and new ones."""

    def __init__(self, case: Case, device: torch.device) -> None:
        spec, batch, total = case.spec, case.batch, case.batch * case.new_tokens
        int32 = partial(torch.tensor, dtype=torch.int32, device=device)
        self.case = case
        point = Point(_Q_HEADS, _KV_HEADS, _HEAD_DIM, batch, max(case.seq_len, 1))
        self.table, _ = page_tables(point, device)
        self.seq_lens = int32([case.seq_len] * batch)
        self.ends = int32(range(0, total + 1, case.new_tokens))
        self.cache = PagedKVCache(spec, self.table.numel(), device, torch.bfloat16, batch)
        fill(self.cache.pages, sample_pages(spec, device))
        if spec.exact_tokens:
            self.cache.exact.normal_()
            self.cache.lengths.copy_(int32([spec.quantized_len(case.seq_len), case.seq_len]))
        self.q = torch.randn(total, _Q_HEADS, _HEAD_DIM, device=device).bfloat16()
        self.k, self.v = torch.randn(2, total, _KV_HEADS, _HEAD_DIM, device=device).bfloat16()
        self.out = torch.full_like(self.q, torch.nan)

    def __call__(self) -> None:
        """Attend."""
        extend_attention(self.q, self.k, self.v, self.cache, self.table, self.seq_lens, self.ends, out=self.out)

    def relative_error(self) -> float:
        """Compare the first and the last new token of the last sequence with float64 attention.

        Raises
        ------
        WrongOutputError
            If they differ by more than rounding does.
        """
        case, b = self.case, self.case.batch - 1
        row = self.ends.new_tensor([b])
        cached = dequantize(self.cache, self.table[b:], self.seq_lens[b:], seq_ids=row)
        own = slice(b * case.new_tokens, None)
        k, v = (torch.cat([old.bfloat16(), new[own]]) for old, new in zip(cached, (self.k, self.v), strict=True))
        error = 0.0
        for i in (0, case.new_tokens - 1):
            seen = case.seq_len + i + 1
            want = exact_attention(self.q[own][i], k[:seen], v[:seen])
            error = max(error, ((self.out[own][i].double() - want).norm() / want.norm()).item())
        if not error <= _TOLERANCE:
            raise WrongOutputError(f"relative error {error:.1e} of the output, more than {_TOLERANCE:.0e}: not timed")
        return error


def measure(case: Case, device: torch.device, with_peers: bool, log: Callable[[str], None]) -> Row:
    """Check, then time.

    Raises
    ------
    WrongOutputError
        If the output is wrong.
    """
    with memory_returned():
        extension = Extension(case, device)
        graph = capture([extension])
        graph.replay()
        error = extension.relative_error()
        us = median_us(graph)
    peers: dict[str, float] = {}
    for backend in ("fa2", "fa3") if with_peers else ():
        try:
            with memory_returned():
                peers[backend] = median_us(capture([_flashinfer(case, device, backend)]))
        except Exception as problem:  # whatever a peer does not support must not end the run
            log(f"{case}, FlashInfer {backend}: {type(problem).__name__}: {str(problem)[:200]}")
    spec = case.spec
    return Row(
        _Q_HEADS,
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
        case.flops / us / 1e6,
        error,
        peers.get("fa2"),
        peers.get("fa3"),
        **environment(device),
    )


def _flashinfer(case: Case, device: torch.device, backend: str) -> Callable[[], object]:
    """Return FlashInfer's prefill over BF16 pages, its plan made beforehand."""
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    length, batch = case.seq_len + case.new_tokens, case.batch
    columns = -(-length // PAGE_SIZE)
    pages = torch.randn(batch * columns, 2, PAGE_SIZE, _KV_HEADS, _HEAD_DIM, device=device).bfloat16()
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        int32(range(0, batch * case.new_tokens + 1, case.new_tokens)),
        int32(range(0, batch * columns + 1, columns)),
        torch.randperm(batch * columns, device=device).int(),
        int32([(length - 1) % PAGE_SIZE + 1] * batch),
        _Q_HEADS,
        _KV_HEADS,
        _HEAD_DIM,
        PAGE_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = torch.randn(batch * case.new_tokens, _Q_HEADS, _HEAD_DIM, device=device).bfloat16()
    return partial(wrapper.run, q, pages, out=torch.empty_like(q))


def table(rows: list[Row]) -> Table:
    """Lay rows out for a terminal."""
    result = Table(title="extend, 32/8 heads of 128")
    for name in ("sequences x new", "cached", "recipe", "us", "TFLOP/s", "error", "fa2 BF16 us", "fa3 BF16 us"):
        result.add_column(name, justify="left" if name == "recipe" else "right")
    for row in rows:
        peers = ("" if us is None else f"{us:.1f}" for us in (row.fa2_bf16_us, row.fa3_bf16_us))
        shape = (f"{row.batch} x {row.new_tokens}", str(row.seq_len), f"INT{row.k_bits} {row.scheme}")
        result.add_row(*shape, f"{row.us:.1f}", f"{row.tflops:.0f}", f"{row.relative_error:.1e}", *peers)
    return result
