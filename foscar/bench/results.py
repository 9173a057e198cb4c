"""What a run leaves: rows of a CSV file, and what they come to."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, TypeVar, get_type_hints

from rich import box
from rich.table import Table

from foscar._checks import require
from foscar.bench.grid import HEADLINE_HEADS, Point

R = TypeVar("R")


@dataclass(frozen=True)
class Row:
    """One line of the CSV file. Times are those of one call, and None for a peer that was not timed.

    Attributes
    ----------
    num_q_heads, num_kv_heads, head_dim, batch, seq_len, skewed
        The `Point`.
    scheme, k_bits, v_bits, spec
        How the cache is stored; `spec` is ``str(CacheSpec)``.
    kernel
        The variant that served.
    us : float
        Microseconds.
    gbps, ceiling_gbps, share
        Bytes of the compressed cache per time, and what a plain read reaches in the same run, in GB/s; their ratio.
    relative_error
        Of the output, against float64 attention over the dequantised cache.
    flashinfer_bf16_us
        The faster of the two that follow.
    fa2_bf16_us, xqa_bf16_us, xqa_fp8_us
        FlashInfer's tensor-core decode, and TensorRT-LLM's kernel with BF16 and FP8 caches.
    gpu, driver, cuda, torch, foscar, flashinfer, commit
        Where, and with what.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    seq_len: int
    skewed: bool
    scheme: str
    k_bits: int
    v_bits: int
    spec: str
    kernel: str
    us: float
    gbps: float
    ceiling_gbps: float
    share: float
    relative_error: float
    flashinfer_bf16_us: float | None
    fa2_bf16_us: float | None
    xqa_bf16_us: float | None
    xqa_fp8_us: float | None
    gpu: str
    driver: str
    cuda: str
    torch: str
    foscar: str
    flashinfer: str
    commit: str

    @property
    def point(self) -> Point:
        """The shape that was measured."""
        return Point(self.num_q_heads, self.num_kv_heads, self.head_dim, self.batch, self.seq_len, self.skewed)

    def speedup(self, column: str) -> float | None:
        """Return how many times faster it is than the peer in a column; None if that was not timed."""
        us: float | None = getattr(self, column)
        return None if us is None else us / self.us

    @property
    def recipe(self) -> str:
        """Bits and scheme."""
        return f"INT{self.k_bits} {self.scheme}"


_READ: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: text == "True",
    float | None: lambda text: float(text) if text else None,
}


def columns(kind: type) -> list[str]:
    """Return the columns of a file of rows of a kind, a dataclass."""
    return [field.name for field in fields(kind)]


def write_header(file: IO[str], kind: type) -> None:
    """Begin a CSV file."""
    csv.writer(file).writerow(columns(kind))


def write_row(file: IO[str], row: Any) -> None:
    """Append a row, and make sure that it survives whatever comes next."""
    values = (getattr(row, column) for column in columns(type(row)))
    csv.writer(file).writerow(f"{x:.6g}" if isinstance(x, float) else x for x in values)
    file.flush()


def read_csv(path: Path, kind: type[R]) -> list[R]:
    """Read rows of a kind back.

    Raises
    ------
    ValueError
        If a column is missing.
    """
    types, names = get_type_hints(kind), columns(kind)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = set(names) - set(reader.fieldnames or ())
        require(not missing, "csv", str(path), f"must have columns {sorted(missing)}")
        return [kind(**{name: _READ.get(types[name], types[name])(line[name]) for name in names}) for line in reader]


@dataclass(frozen=True)
class Goal:
    """A figure, what is wanted of it, and what came out.

    Attributes
    ----------
    name : str
        What is measured.
    wanted : float
        The least, or the most if it is a time.
    unit : str
        ``"x"``, ``"%"`` or ``"us"``.
    measured : float or None
        None if nothing of it was measured.
    points : int
        How many points it comes from.
    """

    name: str
    wanted: float
    unit: str
    measured: float | None
    points: int

    @property
    def met(self) -> bool:
        """Whether it is as wanted."""
        if self.measured is None:
            return False
        return self.measured <= self.wanted if self.unit == "us" else self.measured >= self.wanted


_PEERS = {"FlashInfer BF16": "flashinfer_bf16_us", "TensorRT-LLM FP8": "xqa_fp8_us"}
_WANTED_RATIOS = {
    ("FlashInfer BF16", 2): 5.5,
    ("FlashInfer BF16", 4): 3.4,
    ("TensorRT-LLM FP8", 2): 4.2,
    ("TensorRT-LLM FP8", 4): 2.7,
}
_WANTED_SHARES = {((32, 8), 2): 92, ((64, 8), 2): 88, ((32, 8), 4): 96, ((64, 8), 4): 96}
_WANTED_TIMES = {4096: 6, 32768: 10}


def goals(rows: Iterable[Row]) -> list[Goal]:
    """Compare a run with what is wanted of the kernel, token-wise on an H200."""
    plain = [row for row in rows if row.scheme == "token-wise" and row.k_bits == row.v_bits]

    def goal(name: str, wanted: float, unit: str, values: Iterable[float]) -> Goal:
        found = list(values)
        return Goal(name, wanted, unit, statistics.geometric_mean(found) if found else None, len(found))

    found = []
    for (peer, bits), wanted in _WANTED_RATIOS.items():
        ratios = speedups([row for row in plain if row.point.headline and row.k_bits == bits], _PEERS[peer])
        found.append(goal(f"INT{bits} over {peer}, geometric mean", wanted, "x", ratios))
    for (heads, bits), wanted in _WANTED_SHARES.items():
        point = Point(*heads, 128, 64, 32768)
        shares = (100 * row.share for row in plain if row.point == point and row.k_bits == bits)
        found.append(goal(f"INT{bits}, share of the read ceiling, {point}", wanted, "%", shares))
    for length, wanted in _WANTED_TIMES.items():
        point = Point(*HEADLINE_HEADS[0], 128, 1, length)
        times = (row.us for row in plain if row.point == point and row.k_bits == 2)
        found.append(goal(f"INT2, {point}", wanted, "us", times))
    return found


def speedups(rows: Iterable[Row], column: str) -> list[float]:
    """Return how many times faster each row is than a peer, for rows that have it."""
    return [ratio for row in rows if (ratio := row.speedup(column)) is not None]


def goals_table(found: list[Goal]) -> Table:
    """Lay goals out for a terminal."""
    table = Table("wanted on an H200", box=box.SIMPLE)
    for column in ("points", "wanted", "measured"):
        table.add_column(column, justify="right")
    for goal in found:
        measured = "" if goal.measured is None else f"{goal.measured:.2f} {goal.unit}"
        sign = "<=" if goal.unit == "us" else ">="
        style = "" if goal.measured is None else "green" if goal.met else "yellow"
        table.add_row(goal.name, str(goal.points or ""), f"{sign} {goal.wanted:g} {goal.unit}", measured, style=style)
    return table


_WIDTHS = {"heads x head_dim, batch x length": 34, "recipe": 29, "us": 9, "GB/s": 6, "ceiling": 7, "error": 7}
_PEER_WIDTHS = {"BF16 us": 9, "ratio": 6, "FP8 us": 9, "ratio ": 6}


def rows_table(rows: list[Row], header: bool) -> Table:
    """Lay rows out for a terminal, in columns of fixed width: a table can be printed as it is measured."""
    table = Table(box=None, show_header=header, pad_edge=False, padding=(0, 1, 0, 0))
    for column, width in (_WIDTHS | _PEER_WIDTHS).items():
        table.add_column(column, width=width, justify="left" if width > 20 else "right", no_wrap=True)
    for row in rows:
        peers = []
        for column in _PEERS.values():
            ratio = row.speedup(column)
            peers += ["", ""] if ratio is None else [f"{getattr(row, column):.2f}", f"{ratio:.2f}x"]
        figures = [f"{row.us:.2f}", f"{row.gbps:.0f}", f"{row.share:.1%}", f"{row.relative_error:.1e}"]
        table.add_row(str(row.point), row.recipe, *figures, *peers)
    return table
