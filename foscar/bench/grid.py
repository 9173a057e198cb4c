"""What is measured: shapes of decode attention, and recipes of the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from foscar.layout import PAGE_SIZE, CacheSpec

MAX_TOKENS = 4 << 20  # of a batch
BATCHES = (1, 4, 16, 64)
LENGTHS = (4096, 16384, 65536, 131072)
HEADLINE_HEADS = ((32, 8), (64, 8))
MORE_HEADS = ((32, 4), (8, 1), (32, 32))

SCHEMES: dict[str, Callable[..., CacheSpec]] = {
    "token-wise": CacheSpec.token_wise,
    "token-wise, groups of 32": partial(CacheSpec.token_wise, group_size=32),
    "token-wise + windows": partial(CacheSpec.token_wise, sink_tokens=64, recent_tokens=128),
    "channel-wise K": CacheSpec.kivi,
    "channel-wise K + windows": partial(CacheSpec.kivi, sink_tokens=64, recent_tokens=128),
}


@dataclass(frozen=True)
class Point:
    """One shape of decode attention: a query token for each sequence.

    Attributes
    ----------
    num_q_heads, num_kv_heads, head_dim : int
        Shape of the model.
    batch : int
        Sequences.
    seq_len : int
        Tokens of each sequence.
    skewed : bool
        Whether only the first has so many, and each other half as many as the one before it.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    seq_len: int
    skewed: bool = False

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence."""
        return [self.seq_len >> b if self.skewed else self.seq_len for b in range(self.batch)]

    @property
    def seq_pages(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // PAGE_SIZE) for length in self.seq_lens]

    @property
    def headline(self) -> bool:
        """Whether it counts for the geometric means."""
        return self in _grid(HEADLINE_HEADS)

    def __str__(self) -> str:
        length = f"{self.seq_len}..." if self.skewed else str(self.seq_len)
        return f"{self.num_q_heads}/{self.num_kv_heads} x {self.head_dim}, {self.batch} x {length}"


@dataclass(frozen=True)
class Case:
    """A point, and how its cache is stored.

    Attributes
    ----------
    point : Point
        The shape.
    scheme : str
        One of `SCHEMES`.
    bits : int
        Of K and of V.
    """

    point: Point
    scheme: str
    bits: int

    @property
    def spec(self) -> CacheSpec:
        """The cache's formats and shapes."""
        return SCHEMES[self.scheme](self.bits, self.point.num_kv_heads, self.point.head_dim)

    def __str__(self) -> str:
        return f"INT{self.bits} {self.scheme}"


def _grid(heads: tuple[tuple[int, int], ...]) -> list[Point]:
    shapes = itertools.product(heads, BATCHES, LENGTHS)
    return [Point(*pair, 128, batch, length) for pair, batch, length in shapes if batch * length <= MAX_TOKENS]


def _each(points: list[Point], schemes: list[str]) -> list[tuple[Point, str]]:
    return list(itertools.product(points, schemes))


_AT_32K = [Point(*heads, 128, batch, 32768) for heads in HEADLINE_HEADS for batch in (1, 64)]
_SKEWED = Point(32, 8, 128, 8, 256 << 10, skewed=True)
_EVEN = Point(32, 8, 128, 8, sum(_SKEWED.seq_lens) // 8)
_HEADLINE = _each(_grid(HEADLINE_HEADS) + _AT_32K, ["token-wise"])
_MORE_HEADS = _each(_grid(MORE_HEADS), ["token-wise"])
_FEATURES = [
    *_each(_AT_32K[:2], [*SCHEMES]),  # token-wise, too: times compare within one run
    *_each([_SKEWED, _EVEN, *(Point(32, 8, head_dim, 64, 32768) for head_dim in (64, 256))], ["token-wise"]),
]
GRIDS: dict[str, list[tuple[Point, str]]] = {
    "quick": _each(
        [Point(32, 8, 128, *shape) for shape in ((1, 4096), (1, 32768), (16, 16384), (64, 32768))], ["token-wise"]
    ),
    "headline": _HEADLINE,
    "heads": _MORE_HEADS,
    "features": _FEATURES,
    "full": [*dict.fromkeys([*_HEADLINE, *_MORE_HEADS, *_FEATURES])],
}


def cases(grid: str, bits: list[int]) -> Iterator[tuple[Point, list[Case]]]:
    """Yield each point of one of `GRIDS` with what is measured there."""
    schemes: dict[Point, list[str]] = {}
    for point, scheme in GRIDS[grid]:
        schemes.setdefault(point, []).append(scheme)
    for point, names in schemes.items():
        yield point, [Case(point, scheme, b) for scheme in names for b in bits]
