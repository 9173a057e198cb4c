"""The documentation says what is there: paths, names, commands, figures. Its examples run as doctests."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

import foscar
from foscar.bench.results import Row, goals, read_csv

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
SOURCES = [*ROOT.glob("foscar/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("benchmarks/*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("file", [*PAGES, *SOURCES], ids=lambda p: p.name)
def test_paths_that_are_named_exist(file: Path) -> None:
    for path in re.findall(r"\b(?:foscar|tests|docs|benchmarks)/[\w./]*\w", file.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"\bfoscar((?:\.[A-Za-z_]\w*)+)", page.read_text()):
        found = importlib.import_module("foscar")
        for part in name.removeprefix(".").split("."):
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


def test_readme_has_the_two_commands_that_ci_runs() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv")]
    assert [command.split(".venv/bin/")[-1] for command in commands] == ["foscar demo", "pytest -n auto --cov"]
    assert "readme_command" in (ROOT / ".ci" / "run").read_text()


def test_readme_figures_come_from_the_file() -> None:
    text = (ROOT / "README.md").read_text()
    for r in json.loads((ROOT / "docs" / "data" / "demo.json").read_text())["recipes"]:
        sizes = f"{r['bits_per_element']:.2f} | {r['compression']:.2f}x"
        assert f"| {r['name']} | {sizes} | {r['output_error']:.4f} | {r['top_mass_kept']:.1%} |" in text


def test_readme_speeds_come_from_the_file() -> None:
    text = (ROOT / "README.md").read_text()
    found = {goal.name: goal for goal in goals(read_csv(ROOT / "benchmarks" / "data" / "h200_headline.csv", Row))}
    for bits in (2, 4):
        peers = [found[f"INT{bits} over {peer}, geometric mean"] for peer in ("FlashInfer BF16", "TensorRT-LLM FP8")]
        assert [goal.points for goal in peers] == [30, 30] and "over 30 shapes" in text
        assert f"| INT{bits} token-wise | {peers[0].measured:.2f}x | {peers[1].measured:.2f}x |" in text


def test_numerics_figures_come_from_the_file() -> None:
    lines = (ROOT / "docs" / "data" / "parameter_types.csv").read_text().splitlines()
    measured = {",".join(line.rsplit(",", 5)[1:]) for line in lines}
    rows = re.findall(r"^\|[^|]+\|((?: \d\.\d{4} \|){5})$", (ROOT / "docs" / "numerics.md").read_text(), re.M)
    assert len(rows) == 7
    for row in rows:
        assert row.replace(" ", "").replace("|", ",").strip(",") in measured


def test_format_sizes_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    rows = re.findall(r"^\| INT([24]) (token-wise|channel-wise K)[^|]*\|(.*)\|$", text, re.M)
    assert len(rows) == 4
    for bits, scheme, cells in rows:
        make = foscar.CacheSpec.token_wise if scheme == "token-wise" else foscar.CacheSpec.kivi
        for head_dim, cell in zip((64, 96, 128, 256), cells.split("|"), strict=True):
            spec = make(int(bits), 1, head_dim)
            assert cell.strip() == f"{spec.record_bytes} ({spec.bits_per_element:.3g})"
