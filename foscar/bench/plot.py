"""The figure of a run, drawn from its CSV file."""

from __future__ import annotations

from pathlib import Path

from foscar._checks import require
from foscar.bench.grid import BATCHES, HEADLINE_HEADS
from foscar.bench.results import Row, read_csv


def plot(csv: Path, image: Path) -> None:
    """Draw speed-up over FlashInfer BF16, and share of the read ceiling, against context.

    Parameters
    ----------
    csv : Path
        What ``foscar bench --csv`` wrote.
    image : Path
        The file to write.

    Raises
    ------
    ValueError
        If the file lacks a column, or rows of the headline.
    """
    from matplotlib.figure import Figure

    heads = HEADLINE_HEADS[0]
    rows = [row for row in read_csv(csv, Row) if row.scheme == "token-wise" and row.point.headline]
    rows = sorted((row for row in rows if (row.num_q_heads, row.num_kv_heads) == heads), key=lambda row: row.seq_len)
    require(bool(rows), "csv", str(csv), f"must have rows of the grid with {heads[0]}/{heads[1]} heads")
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, batch in enumerate(BATCHES):
        for bits, line in ((2, "o-"), (4, "s--")):
            chosen = [row for row in rows if (row.batch, row.k_bits) == (batch, bits)]
            style = {"color": f"C{color}", "label": f"INT{bits}, batch {batch}", "markersize": 4}
            for axes, points in ((left, _speedups(chosen)), (right, _shares(chosen))):
                if points:
                    axes.plot(*zip(*points, strict=True), line, **style)
    left.set(title="speed-up over FlashInfer BF16", ylim=(0, None))
    left.axhline(1, color="gray", linewidth=0.8)
    right.set(title="share of the read ceiling, %", ylim=(0, 100))
    lengths = sorted({row.seq_len for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length >> 10}K" for length in lengths])
        axes.set_xlabel("context, tokens of each sequence")
        axes.grid(alpha=0.3)
    right.legend(ncols=2, fontsize=8)
    first = rows[0]
    figure.suptitle(
        f"{first.gpu}, {heads[0]}/{heads[1]} heads, head_dim {first.head_dim}, CUDA graph, cold caches; a plain read "
        f"reaches {first.ceiling_gbps:.0f} GB/s. foscar {first.foscar}, FlashInfer {first.flashinfer or '-'}",
        fontsize=9,
    )
    figure.savefig(image, dpi=150)


def _speedups(rows: list[Row]) -> list[tuple[int, float]]:
    ratios = ((row.seq_len, row.speedup("flashinfer_bf16_us")) for row in rows)
    return [(length, ratio) for length, ratio in ratios if ratio is not None]


def _shares(rows: list[Row]) -> list[tuple[int, float]]:
    return [(row.seq_len, 100 * row.share) for row in rows]
