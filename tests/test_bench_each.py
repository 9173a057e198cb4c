"""The benchmarks of appending and extending: all of them but the timing runs without a GPU."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from foscar.bench import append, extend, results
from foscar.bench.timing import WrongOutputError
from foscar.cli import app

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "200"}
MODULES = pytest.mark.parametrize("module", [append, extend], ids=lambda module: module.__name__)


class Calls:
    """A graph of calls, replayed by making them."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self.calls = calls
        self.replay()

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dict.fromkeys(("gpu", "driver", "cuda", "torch", "foscar", "flashinfer", "commit"), "x")
    for module in (append, extend):
        monkeypatch.setattr(module, "environment", lambda device: here)
        monkeypatch.setattr(module, "capture", Calls)
        monkeypatch.setattr(module, "median_us", lambda graph: 8.0)
    monkeypatch.setattr(append, "copy_ceiling", lambda device: 2500.0)
    monkeypatch.setattr(append, "_CALLS", 2)
    monkeypatch.setattr(append, "SHAPES", [(3, 127, 1), (1, 0, 70)])
    monkeypatch.setattr(extend, "SHAPES", [(2, 100, 5)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_appends() -> None:
    cases = list(append.cases([2, 4]))
    assert {(case.scheme, case.bits) for case in cases} == {(name, 2) for name in append.RECIPES} | {("token-wise", 4)}
    assert all(case.bits == 4 for case in append.cases([4]))
    case = cases[0]
    assert case.seq_lens == [127, 128, 129] and case.nbytes == 3 * 8 * (512 + 72)
    for case in cases:
        row = append.measure(case, CPU, False, pytest.fail)
        us = 4.0 if case.seq_len else 8.0  # of two calls, or of one
        assert row.us == us and row.share == pytest.approx(case.nbytes / us / 1e3 / 2500)


@pytest.mark.parametrize("scheme", append.RECIPES)
def test_appends_begin_anew(scheme: str) -> None:
    """A graph that is replayed does all its work again: what left a ring is back in it."""
    appends = append.Appends(append.Case(scheme, 2, 3, 127, 1), CPU)
    before = [cache.lengths.clone() for cache in appends.caches]
    for _ in range(2):
        for call in appends.calls:
            call()
        appends.check()
    if appends.case.spec.exact_tokens:
        assert not torch.equal(appends.caches[0].lengths, before[0])
        appends.rewind()
        assert all(torch.equal(cache.lengths, kept) for cache, kept in zip(appends.caches, before, strict=True))
    appends.caches[-1].pages += 1
    with pytest.raises(WrongOutputError, match="of the bytes are those of the reference: not timed"):
        appends.check()


def test_extensions() -> None:
    cases = list(extend.cases([2, 4]))
    assert {case.bits for case in cases} == {2, 4} and {case.bits for case in extend.cases([2])} == {2}
    row = extend.measure(cases[0], CPU, False, pytest.fail)
    assert row.us == 8.0 and 0 < row.relative_error < 1e-2 and row.fa2_bf16_us is None
    seen = sum(100 + i + 1 for i in range(5)) * 2
    assert row.tflops == pytest.approx(4 * 128 * 32 * seen / 8.0 / 1e6)
    extension = extend.Extension(cases[0], CPU)
    extension()
    extension.out *= 1.1
    with pytest.raises(WrongOutputError, match="relative error"):
        extension.relative_error()


@MODULES
def test_peers_that_fail(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    row = module.measure(next(iter(module.cases([2]))), CPU, True, messages.append)
    assert messages and all("FlashInfer" in message and "Error" in message for message in messages)
    assert {None} == ({row.fa2_bf16_us, row.fa3_bf16_us} if module is extend else {row.flashinfer_bf16_us})


@MODULES
def test_command(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = tmp_path / "out.csv", module.__name__.rpartition(".")[2]
    monkeypatch.setattr("foscar.bench.peers.installed", lambda: False)
    measure = module.measure
    monkeypatch.setattr(module, "measure", lambda case, device, *rest: measure(case, CPU, *rest))
    arguments = ["bench", name, "--bits", "2", "--csv", str(path)]
    result = CliRunner().invoke(app, arguments, env=WIDE, catch_exceptions=False)
    assert result.exit_code == 0 and "INT2 token-wise" in result.stdout and "FlashInfer is not" in result.stdout
    rows = results.read_csv(path, module.Row)
    assert len(rows) == len(list(module.cases([2])))
    with path.open(newline="") as file:
        assert {"us", "spec", "gpu", "commit"} <= set(next(csv.reader(file)))

    def wrong(case: object, *_: object) -> object:
        if case == next(iter(module.cases([2]))):
            raise WrongOutputError("far off")
        return rows[0]

    monkeypatch.setattr(module, "measure", wrong)
    result = CliRunner().invoke(app, arguments, env=WIDE)
    assert result.exit_code == 1 and "far off" in result.stdout and "1 cases were not timed" in result.stdout
    assert len(results.read_csv(path, module.Row)) == len(rows) - 1
