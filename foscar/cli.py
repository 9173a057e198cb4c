"""The command line."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from foscar import demo as demo_module
from foscar import info as info_module
from foscar._version import __version__

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
console = Console()

Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file, for machines.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"foscar {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Keep a key-value cache in 2 or 4 bits, and decode attention over it."""


@app.command()
def demo(
    activations: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A safetensors file of layer<i>.k, .v and .q, [tokens, heads, head_dim] after RoPE.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode, at most as many as there are queries.")] = 32,
    plot: Annotated[Path, typer.Option(help="Where to write the figure.")] = Path("foscar-demo.png"),
    json_file: Json = None,
) -> None:
    """Decode a real model's attention from BF16, 4-bit and 2-bit caches, and compare error and memory."""
    _check_writable(plot, json_file)
    try:
        layers = demo_module.load_activations(activations, steps)
        total = len(layers) * (1 + len(demo_module.specs(1, 64)))
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("exact", total=total)
            recipes = demo_module.run(layers, lambda name: progress.update(task, advance=1, description=name))
    except ValueError as error:
        raise _failure(str(error)) from error
    console.print(demo_module.table(recipes, layers))
    console.print(demo_module.LEGEND, markup=False, highlight=False)
    demo_module.plot(recipes, plot)
    console.print(f"Figure: {plot}", markup=False)
    _write(json_file, demo_module.to_json(recipes))


@app.command()
def info(json_file: Json = None) -> None:
    """Show versions, devices, and which backend serves which spec."""
    _check_writable(json_file)
    found = info_module.collect()
    console.print(info_module.render(found))
    _write(json_file, found)


@app.command()
def kernels(
    arch: Annotated[
        str, typer.Option(help="Architecture to compile for; needs no GPU. Kernels are written for sm_90a.")
    ] = "sm_90a",
    every: Annotated[
        bool, typer.Option("--all", help="All but float16 twins, in many minutes, not some of each kind.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Compile kernels and show their registers, spills, shared memory and instructions."""
    from foscar.cuda import inspect
    from foscar.cuda.compiler import CompileError

    _check_writable(json_file)
    variants = list(inspect.shipped_variants() if every else inspect.sample_variants())
    reports = []
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("compiling", total=len(variants))
            for variant in variants:
                progress.update(task, description=variant.name)
                reports.append(inspect.inspect(variant, arch))
                progress.advance(task)
    except (CompileError, inspect.ToolMissingError) as error:
        raise _failure(str(error)) from error
    console.print(inspect.table(reports))
    _write(json_file, [asdict(report) for report in reports])


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="decode, append or extend.")] = "decode",
    grid: Annotated[str | None, typer.Option(help="Of decode: quick, headline, heads, features or full.")] = None,
    bits: Annotated[list[int], typer.Option(help="2 or 4; repeat it for both.")] = [2, 4],  # noqa: B006
    csv: Annotated[Path | None, typer.Option(help="Write each row to this file as it is measured.")] = None,
    peers: Annotated[bool, typer.Option(help="Time FlashInfer's kernels, too, if foscar[bench] is installed.")] = True,
) -> None:
    """Time decode attention, or appending and extending, on this machine's GPU, next to FlashInfer's kernels."""
    import torch

    from foscar.bench.grid import GRIDS
    from foscar.bench.peers import installed

    _check_writable(csv)
    if what not in ("decode", "append", "extend"):
        raise _failure(f"what={what!r}: must be decode, append or extend")
    if grid not in (GRIDS if what == "decode" else {}) and grid is not None:
        raise _failure(f"grid={grid!r}: must be " + (f"one of {list(GRIDS)}" if what == "decode" else "decode's"))
    if not set(bits) <= {2, 4}:
        raise _failure(f"bits={bits}: each must be 2 or 4")
    if not torch.cuda.is_available():
        raise _failure("a CUDA GPU is needed, and there is none here")
    if peers and not installed():
        console.print("FlashInfer is not installed, so its columns stay empty: pip install foscar[bench]", markup=False)
    device = torch.device("cuda", torch.cuda.current_device())
    if what == "decode":
        _bench_decode(device, grid or "headline", bits, csv, peers and installed())
    else:
        from foscar.bench import append, extend

        _bench_each(append if what == "append" else extend, device, bits, csv, peers and installed())


def _bench_decode(device: torch.device, grid: str, bits: list[int], csv: Path | None, peers: bool) -> None:
    import torch

    from foscar.bench import results
    from foscar.bench.grid import cases
    from foscar.bench.run import Run
    from foscar.bench.timing import read_ceiling

    ceiling = read_ceiling(device)
    console.print(f"{torch.cuda.get_device_name(device)}: a plain read reaches {ceiling:.0f} GB/s", highlight=False)
    rows: list[results.Row] = []
    with contextlib.ExitStack() as stack:
        file = None if csv is None else stack.enter_context(csv.open("w", newline=""))
        if file is not None:
            results.write_header(file, results.Row)
        progress = stack.enter_context(Progress(console=console, transient=True))
        run = Run(device, ceiling, peers, partial(console.print, style="yellow", markup=False))
        points = list(cases(grid, bits))
        task = progress.add_task("", total=len(points))
        for point, recipes in points:
            progress.update(task, description=str(point))
            measured = run.measure(point, recipes)
            if measured:
                console.print(results.rows_table(measured, header=not rows))
            for row in measured:
                if file is not None:
                    results.write_row(file, row)
            rows += measured
            progress.advance(task)
    console.print(results.goals_table(results.goals(rows)))
    if run.failures:
        raise _failure(f"{run.failures} cases were not timed; see above")


def _bench_each(module: ModuleType, device: torch.device, bits: list[int], csv: Path | None, peers: bool) -> None:
    """Measure the cases of `foscar.bench.append` or `foscar.bench.extend`."""
    import torch

    from foscar.bench.results import write_header, write_row
    from foscar.bench.timing import WrongOutputError

    log = partial(console.print, style="yellow", markup=False)
    failures, rows, cases = 0, [], list(module.cases(bits))
    with contextlib.ExitStack() as stack:
        file = None if csv is None else stack.enter_context(csv.open("w", newline=""))
        if file is not None:
            write_header(file, module.Row)
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=str(case))
            try:
                rows.append(module.measure(case, device, peers, log))
            except (WrongOutputError, torch.OutOfMemoryError) as error:
                failures += 1
                log(f"{case}: {error}")
            else:
                if file is not None:
                    write_row(file, rows[-1])
            progress.advance(task)
    console.print(module.table(rows))
    if failures:
        raise _failure(f"{failures} cases were not timed; see above")


@app.command()
def bench_plot(
    csv: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `foscar bench --csv` wrote.")],
    image: Annotated[Path, typer.Argument(help="Where to write the figure.")],
) -> None:
    """Draw the results of a benchmark, and compare them with what is wanted."""
    from foscar.bench import results
    from foscar.bench.plot import plot

    _check_writable(image)
    try:
        plot(csv, image)
        console.print(results.goals_table(results.goals(results.read_csv(csv, results.Row))))
    except ValueError as error:
        raise _failure(str(error)) from error
    console.print(f"Figure: {image}", markup=False)


def _failure(message: str) -> typer.Exit:
    console.print(f"error: {message}", style="red", markup=False)
    return typer.Exit(1)


def _check_writable(*paths: Path | None) -> None:
    """Fail before the work that a file would be missing for."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise _failure(f"{path}: there is no such folder")


def _write(path: Path | None, data: dict[str, Any] | list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n")
        console.print(f"JSON: {path}", markup=False)
