"""The benchmark: all of it but the timing runs without a GPU."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

from foscar.bench import results, run
from foscar.bench.grid import GRIDS, SCHEMES, Case, Point, cases
from foscar.bench.peers import PEERS, Peer
from foscar.bench.results import Row
from foscar.bench.timing import Timing, WrongOutputError
from foscar.bench.workload import Workload, fill, foscar_workload, page_tables, relative_error
from foscar.cli import app
from foscar.cuda import read
from foscar.cuda.compiler import compile_cubin

CPU = torch.device("cpu")
WIDE = {"COLUMNS": "200"}


def row(batch: int = 1, seq_len: int = 4096, bits: int = 2, us: float = 5.0, **other: object) -> Row:
    filled = Row(
        *(32, 8, 128, batch, seq_len, False, "token-wise", bits, bits, f"k{bits}", "decode", us, 4000.0, 4500.0, 0.9),
        *(4e-4, 20.0, 21.0, 20.0, 10.0, "H200", "580.1", "13.0", "2.11", "0.1.0", "0.7.2", "abc"),
    )
    return replace(filled, **other)  # type: ignore[arg-type]


def test_grids() -> None:
    headline = [point for point, _ in GRIDS["headline"] if point.headline]
    # 32/8 and 64/8 heads: 4 batches of 4 lengths each, without the one that has 8M tokens.
    assert len(set(headline)) == len(headline) == 2 * 15
    assert Point(32, 8, 128, 64, 131072) not in headline
    every = {point for grid in GRIDS.values() for point, _ in grid}
    assert all(sum(point.seq_lens) <= 4 << 20 for point in every)
    assert {(p.num_q_heads, p.num_kv_heads) for p in every} == {(32, 8), (64, 8), (32, 4), (8, 1), (32, 32)}
    assert {point.head_dim for point in every} == {64, 128, 256}
    assert {scheme for _, scheme in GRIDS["features"]} == set(SCHEMES)
    assert set(GRIDS["full"]) == {case for grid in ("headline", "heads", "features") for case in GRIDS[grid]}
    assert len(GRIDS["quick"]) == 4
    for heads in (32, 64):
        for batch in (1, 64):
            assert (Point(heads, 8, 128, batch, 32768), "token-wise") in GRIDS["headline"]
    skewed = next(point for point in every if point.skewed)
    assert skewed.seq_lens == [(256 << 10) >> b for b in range(8)] and skewed.seq_lens[-1] == 2048
    assert any(not p.skewed and p.batch == 8 and sum(p.seq_lens) == sum(skewed.seq_lens) for p in every)


@pytest.mark.parametrize("grid", GRIDS)
def test_cases_of_a_point_come_together(grid: str) -> None:
    grouped = list(cases(grid, [2, 4]))
    assert len({point for point, _ in grouped}) == len(grouped)
    assert sum(len(group) for _, group in grouped) == 2 * len(GRIDS[grid])
    for point, group in grouped:
        assert all(case.point == point and case.spec.head_dim == point.head_dim for case in group)
        assert [case.bits for case in group[:2]] == [2, 4]


def test_csv_round_trip(tmp_path: Path) -> None:
    rows = [row(), row(seq_len=16384, bits=4, us=7.25, flashinfer_bf16_us=None, fa2_bf16_us=None, skewed=True)]
    path = tmp_path / "out.csv"
    with path.open("w", newline="") as file:
        results.write_header(file, Row)
        for n, each in enumerate(rows, 1):
            results.write_row(file, each)
            assert results.read_csv(path, Row) == rows[:n]  # flushed
    with path.open(newline="") as file:
        columns = next(csv.reader(file))
    wanted = "num_q_heads,num_kv_heads,head_dim,batch,seq_len,k_bits,v_bits,scheme,us,gbps,ceiling_gbps"
    assert set(columns) >= {*wanted.split(","), "flashinfer_bf16_us", "xqa_fp8_us", "spec", "kernel", "commit", "gpu"}
    assert {peer.column for peer in PEERS} <= set(columns)
    path.write_text(path.read_text().replace("ceiling_gbps", "other"))
    with pytest.raises(ValueError, match=r"must have columns \['ceiling_gbps'\]"):
        results.read_csv(path, Row)


def test_goals() -> None:
    rows = [
        row(us=5.0),
        row(us=20.0, seq_len=16384),  # ratios 4 and 1: their geometric mean is 2
        row(us=20.0, seq_len=65536, flashinfer_bf16_us=None),
        row(us=1.0, seq_len=32768),  # not in the grid of the means
        row(us=1.0, scheme="channel-wise K"),
        row(us=1.0, head_dim=64),
        row(us=200.0, batch=64, seq_len=32768, bits=4, share=0.95),
    ]
    goals = {goal.name: goal for goal in results.goals(rows)}
    over_bf16 = goals["INT2 over FlashInfer BF16, geometric mean"]
    assert over_bf16.measured == pytest.approx(2) and over_bf16.points == 2 and not over_bf16.met
    over_fp8 = goals["INT2 over TensorRT-LLM FP8, geometric mean"]
    assert over_fp8.measured == pytest.approx((2 * 0.5 * 0.5) ** (1 / 3)) and over_fp8.points == 3
    assert goals["INT4 over FlashInfer BF16, geometric mean"].measured is None
    share = goals["INT4, share of the read ceiling, 32/8 x 128, 64 x 32768"]
    assert share.measured == pytest.approx(95) and share.wanted == 96 and not share.met
    assert goals["INT2, 32/8 x 128, 1 x 4096"].met and goals["INT2, 32/8 x 128, 1 x 32768"].met
    assert not goals["INT2, share of the read ceiling, 64/8 x 128, 64 x 32768"].met


def test_bench_plot(tmp_path: Path) -> None:
    path, image = tmp_path / "out.csv", tmp_path / "out.png"
    with path.open("w", newline="") as file:
        results.write_header(file, Row)
        for bits in (2, 4):
            for batch, seq_len in ((1, 4096), (1, 16384), (64, 65536)):
                results.write_row(file, row(batch, seq_len, bits, flashinfer_bf16_us=None if batch == 1 else 30.0))
    result = CliRunner().invoke(app, ["bench-plot", str(path), str(image)], env=WIDE, catch_exceptions=False)
    assert result.exit_code == 0 and "6.00 x" in result.stdout
    assert matplotlib.image.imread(image).shape[2] == 4
    image.unlink()
    path.write_text(",".join(results.columns(Row)) + "\n")
    result = CliRunner().invoke(app, ["bench-plot", str(path), str(image)], env=WIDE)
    assert result.exit_code == 1 and "must have rows" in result.stdout and not image.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "all"], "grid='all': must be one of"),
        (["prefill"], "what='prefill': must be decode, append or extend"),
        (["append", "--grid", "quick"], "grid='quick': must be decode's"),
        (["extend", "--csv", "absent/out.csv"], "absent/out.csv: there is no such folder"),
        (["--bits", "3"], "bits=[3]: each must be 2 or 4"),
        (["--csv", "absent/out.csv"], "absent/out.csv: there is no such folder"),
        ([], "a CUDA GPU is needed"),
    ],
)
def test_bench_refuses(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", *arguments], env=WIDE)
    assert result.exit_code == 1 and message in result.stdout.replace("\n", " ")


def test_page_tables() -> None:
    point = Point(4, 2, 64, 3, 1024, skewed=True)
    table, lengths = page_tables(point, CPU)
    assert lengths.tolist() == [1024, 512, 256] and table.dtype == lengths.dtype == torch.int32
    used = [table[b, :pages] for b, pages in enumerate((16, 8, 4))]
    assert torch.cat(used).sort().values.tolist() == list(range(28)) and table.shape == (3, 16)


def test_fill() -> None:
    samples = torch.randn(3, 2, 64, 8).to(torch.float8_e4m3fn)
    target = torch.empty(5000, 2, 64, 8, dtype=torch.float8_e4m3fn)
    fill(target, samples)
    same = (target[:, None].view(torch.uint8) == samples.view(torch.uint8)).flatten(2).all(2)
    assert (same.sum(1) == 1).all() and same.any(0).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_are_checked(scheme: str, bits: int) -> None:
    case = Case(Point(4, 2, 64, 3, 1024, skewed=True), scheme, bits)
    workload = foscar_workload(case, CPU)
    assert workload.nbytes == sum(case.spec.sequence_bytes(length) for length in (1024, 512, 256))
    workload.out.fill_(torch.nan)
    assert math.isnan(relative_error(workload))
    workload.calls[-1]()
    assert relative_error(workload) < run.TOLERANCE
    workload.out[-1] *= 1.1
    assert relative_error(workload) > run.TOLERANCE


SMALL = Point(4, 2, 64, 1, 256)
SMALL_CASES = [Case(SMALL, "token-wise", bits) for bits in (2, 4)]


def time(workload: Workload, tolerance: float) -> Timing:
    if tolerance < 0:
        raise WrongOutputError("far off")
    return Timing(2.0, workload.nbytes / 2e3, 1e-3)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    here = dict.fromkeys(("gpu", "driver", "cuda", "torch", "foscar", "flashinfer", "commit"), "x")
    monkeypatch.setattr(run, "environment", lambda device: here)
    monkeypatch.setattr(run, "backend", lambda spec, dtype, device: ("cuda", ""))
    monkeypatch.setattr(run, "time_workload", time)
    return []


def test_rows(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(point: Point, device: torch.device) -> Workload:
        raise NotImplementedError("no such kernel\nand more")

    def slower(point: Point, device: torch.device) -> Workload:
        return foscar_workload(SMALL_CASES[0], device)

    peers = [Peer("A", "fa2_bf16_us", slower, 1), Peer("B", "xqa_bf16_us", absent, 1)]
    monkeypatch.setattr("foscar.bench.peers.PEERS", [*peers, Peer("C", "xqa_fp8_us", slower, -1)])
    measuring = run.Run(CPU, 100.0, True, messages.append)
    rows = measuring.measure(SMALL, SMALL_CASES)
    assert [r.k_bits for r in rows] == [2, 4] and all(r.point == SMALL for r in rows)
    assert rows[0].share == pytest.approx(rows[0].gbps / 100) and rows[0].kernel == "decode_k2t64_v2t64_d64_r4_bf16"
    assert (rows[0].flashinfer_bf16_us, rows[0].xqa_bf16_us, rows[0].xqa_fp8_us) == (2.0, None, None)
    assert "B: NotImplementedError: no such kernel" in messages[0] and "far off" in messages[1]
    assert len(messages) == 2 and measuring.failures == 0


def test_wrong_outputs_are_failures(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TOLERANCE", -1)
    measuring = run.Run(CPU, 100.0, True, messages.append)
    assert measuring.measure(SMALL, SMALL_CASES) == []
    assert measuring.failures == 2 and all("far off" in message for message in messages)


def test_what_no_kernel_serves_is_skipped(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "backend", lambda spec, dtype, device: ("reference", "not on this device"))
    assert run.Run(CPU, 100.0, True, messages.append).measure(SMALL, SMALL_CASES) == []
    assert len(messages) == 2 and all("skipped, not on this device" in message for message in messages)


def test_bench_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does with what a run measures; one point has no rows, another a failure."""

    def measure(self: run.Run, point: Point, group: list[Case]) -> list[Row]:
        assert not self.with_peers and self.ceiling_gbps == 4500.0
        if point.seq_len == 32768 and point.batch == 1:
            self.log("nothing [here]")
            return []
        self.failures += point.seq_len == 16384
        return [row(point.batch, point.seq_len, case.bits) for case in group]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("foscar.bench.timing.read_ceiling", lambda device: 4500.0)
    monkeypatch.setattr("foscar.bench.peers.installed", lambda: False)
    monkeypatch.setattr(run.Run, "measure", measure)
    arguments = ["bench", "--grid", "quick", "--bits", "2", "--bits", "4", "--csv", str(tmp_path / "out.csv")]
    result = CliRunner().invoke(app, arguments, env=WIDE, catch_exceptions=False)
    assert result.exit_code == 1 and "1 cases were not timed" in result.stdout
    assert "FlashInfer is not installed" in result.stdout and "nothing [here]" in result.stdout
    assert "a plain read reaches 4500 GB/s" in result.stdout and result.stdout.count("recipe") == 1
    assert "INT2 token-wise" in result.stdout and "4.00x" in result.stdout and "90.0%" in result.stdout
    assert [(r.batch, r.k_bits) for r in results.read_csv(tmp_path / "out.csv", Row)] == [
        *((1, 2), (1, 4), (16, 2), (16, 4), (64, 2), (64, 4)),
    ]
    monkeypatch.setattr("foscar.bench.peers.installed", lambda: True)
    result = CliRunner().invoke(app, ["bench", "--grid", "quick", "--no-peers"], env=WIDE)
    assert "FlashInfer is not" not in result.stdout


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    here = run.environment.__wrapped__(CPU)
    assert set(here) <= set(results.columns(Row)) and here["gpu"] == "a GPU" and here["torch"] == torch.__version__
    assert len(here["commit"]) in (0, 40)
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    assert run.commit() == ""


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_streaming_read_compiles(arch: str) -> None:
    pytest.importorskip("cuda.pathfinder", reason="the CUDA wheels are not installed")
    assert compile_cubin(read.source(), arch, "read")


@pytest.mark.gpu
def test_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS, "quick", GRIDS["quick"][:1])
    path = tmp_path / "out.csv"
    arguments = ["bench", "--grid", "quick", "--no-peers", "--csv", str(path)]
    result = CliRunner().invoke(app, arguments, env=WIDE, catch_exceptions=False)
    assert result.exit_code == 0
    if torch.cuda.get_device_capability() != (9, 0):
        assert "skipped" in result.stdout
        return
    rows = results.read_csv(path, Row)
    assert [r.k_bits for r in rows] == [2, 4] and all(r.point == Point(32, 8, 128, 1, 4096) for r in rows)
    for r in rows:
        assert 0 < r.share < 1 and r.us > 0 and r.relative_error <= run.TOLERANCE and r.flashinfer_bf16_us is None
