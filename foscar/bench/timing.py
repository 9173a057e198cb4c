"""Timing on the GPU: graphs of calls, and a plain read to compare with."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from foscar.bench.workload import Workload, relative_error
from foscar.cuda.read import TILE_BYTES, read

CALLS, WARM_UPS, REPLAYS = 16, 3, 20
# Replays that take longer are steady enough for fewer.
_LONG_MS, _LONG_REPLAYS = 200, 5
_CEILING_BYTES = 4 << 30
_COPIED_BYTES = 1 << 30


class WrongOutputError(RuntimeError):
    """What should have been timed computes something else."""


@dataclass(frozen=True)
class Timing:
    """One call of a workload.

    Attributes
    ----------
    us : float
        Microseconds: the median of all replays.
    gbps : float
        Bytes of its cache per time, in GB/s.
    relative_error : float
        Of the output.
    """

    us: float
    gbps: float
    relative_error: float


def time_workload(workload: Workload, tolerance: float) -> Timing:
    """Replay a CUDA graph of all calls, after a look at what it computes.

    Raises
    ------
    WrongOutputError
        If the relative error of the graph's output exceeds `tolerance`.
    """
    calls = workload.calls * math.ceil(CALLS / len(workload.calls))
    graph = capture(calls)
    workload.out.fill_(torch.nan)
    graph.replay()
    error = relative_error(workload)
    if not error <= tolerance:
        raise WrongOutputError(f"relative error {error:.1e} of the output, more than {tolerance:.0e}: not timed")
    us = median_us(graph) / len(calls)
    return Timing(us, workload.nbytes / us / 1e3, error)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of calls, made once before: to compile, and to allocate what must not be in a graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def median_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of a replay: the median of several."""
    slow = statistics.median(_intervals(graph.replay, WARM_UPS)) > _LONG_MS
    return statistics.median(_intervals(graph.replay, _LONG_REPLAYS if slow else REPLAYS)) * 1e3


@functools.cache
def copy_ceiling(device: torch.device) -> float:
    """Return the GB/s that a copy of 1 GiB reads and writes: the best of several."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / min(_intervals(partial(target.copy_, source), REPLAYS)) / 1e6


def read_ceiling(device: torch.device) -> float:
    """Return the most GB/s that a streaming read of 4 GiB reaches: the best of several grids and repeats.

    Raises
    ------
    WrongOutputError
        If the read misses something.
    """
    data = torch.randint(-(2**31), 2**31, (_CEILING_BYTES // 4,), dtype=torch.int32, device=device)
    total = torch.zeros(1, dtype=torch.int32, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    best = math.inf
    for ctas in (sms, 2 * sms, 4 * sms, 8 * sms, _CEILING_BYTES // TILE_BYTES):
        total.zero_()
        read(data, total, ctas)
        if (total.item() - data.sum(dtype=torch.int64).item()) % 2**32:
            raise WrongOutputError("the streaming read did not add up")
        best = min(best, *_intervals(partial(read, data, total, ctas), REPLAYS))
    return data.nbytes / best / 1e6


def _intervals(call: Callable[[], object], times: int) -> list[float]:
    """Return milliseconds from each call's end to the next one's: queued together, so that none waits for the host."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


@contextmanager
def memory_returned() -> Iterator[None]:
    """Give the memory of what lived inside back to the device."""
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()
