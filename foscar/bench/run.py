"""Going through a grid: what is timed, refused and written down at each point."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from foscar._version import __version__
from foscar.bench import peers
from foscar.bench.grid import Case, Point
from foscar.bench.results import Row
from foscar.bench.timing import Timing, WrongOutputError, memory_returned, time_workload
from foscar.bench.workload import foscar_workload
from foscar.cuda.config import MAX_ROWS, DecodeConfig
from foscar.cuda.decode import is_small
from foscar.ops import backend

TOLERANCE = 3e-3  # of a bfloat16 output


@dataclass
class Run:
    """A run on one device.

    Attributes
    ----------
    device : torch.device
        Where.
    ceiling_gbps : float
        What a plain read reaches there.
    with_peers : bool
        Whether to time FlashInfer's kernels, too.
    log : callable
        Told what is not timed, and why.
    failures : int
        Cases of foscar that were refused because of what they computed, or did not fit in memory.
    """

    device: torch.device
    ceiling_gbps: float
    with_peers: bool
    log: Callable[[str], None]
    failures: int = 0

    def measure(self, point: Point, cases: list[Case]) -> list[Row]:
        """Time each case of a point that a kernel serves, then the peers."""
        timings: dict[Case, Timing] = {}
        for case in cases:
            name, reason = backend(case.spec, torch.bfloat16, self.device)
            if name != "cuda":
                self.log(f"{point}, {case}: skipped, {reason}")
                continue
            try:
                with memory_returned():
                    timings[case] = time_workload(foscar_workload(case, self.device), TOLERANCE)
            except (WrongOutputError, torch.OutOfMemoryError) as error:
                self.failures += 1
                self.log(f"{point}, {case}: {error}")
        times = self._time_peers(point) if self.with_peers and timings else {}
        return [self._row(case, timing, times) for case, timing in timings.items()]

    def _time_peers(self, point: Point) -> dict[str, float]:
        times = {}
        for peer in peers.PEERS:
            try:
                with memory_returned():
                    times[peer.column] = time_workload(peer.workload(point, self.device), peer.tolerance).us
            except Exception as error:  # whatever a peer does not support must not end the run
                message = str(error).strip().splitlines()
                self.log(f"{point}, {peer.name}: {type(error).__name__}: {message[0][:200] if message else ''}")
        return times

    def _row(self, case: Case, timing: Timing, times: dict[str, float]) -> Row:
        point, spec = case.point, case.spec
        rows = min(point.num_q_heads // point.num_kv_heads, MAX_ROWS)
        on_gpu = self.device.type == "cuda"
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 0
        small = is_small(spec, point.batch, max(point.seq_pages), sms)
        bf16 = [times[column] for column in ("fa2_bf16_us", "xqa_bf16_us") if column in times]
        return Row(
            point.num_q_heads,
            point.num_kv_heads,
            point.head_dim,
            point.batch,
            point.seq_len,
            point.skewed,
            case.scheme,
            spec.k.bits,
            spec.v.bits,
            str(spec),
            DecodeConfig.choose(spec, torch.bfloat16, rows, small).name,
            timing.us,
            timing.gbps,
            self.ceiling_gbps,
            timing.gbps / self.ceiling_gbps,
            timing.relative_error,
            min(bf16, default=None),
            times.get("fa2_bf16_us"),
            times.get("xqa_bf16_us"),
            times.get("xqa_fp8_us"),
            **environment(self.device),
        )


@functools.cache
def environment(device: torch.device) -> dict[str, str]:
    """Return the columns that say where, and with what, a run was made."""
    driver = flashinfer_version = ""
    with contextlib.suppress(Exception):  # where the management library is missing, so is this column
        from cuda.core import system

        driver = ".".join(map(str, system.get_kernel_mode_driver_version()))
    if peers.installed():
        import flashinfer

        flashinfer_version = flashinfer.__version__
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "foscar": __version__,
        "flashinfer": flashinfer_version,
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit that is checked out if foscar runs from its repository, else an empty string."""
    here = Path(__file__)
    command = ["git", "-C", str(here.parent), "rev-parse", "HEAD", f"HEAD:./{here.name}"]
    try:
        # The second name fails in a repository that does not hold this file.
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return ""
