"""Loading kernels, launching them on torch's streams, and the memory that they leave things in for one another."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Any

import torch

from foscar._checks import refuse
from foscar.cuda.compiler import compile_cubin, cuda_core
from foscar.cuda.config import CTA_PART_FLOATS, WARP_PART_FLOATS, KernelConfig

logger = logging.getLogger("foscar")

MAX_ARRIVALS = 1 << 16  # sequences of a batch that is appended to
_GRAPHS = -1  # instead of a stream
_workspaces: dict[tuple[int, int], int] = {}  # by device and stream


# All of them, so that none is unloaded: of two threads that load one at once, the cache keeps only one's.
_kernels: list[Kernel] = []


class Kernel:
    """A kernel of one structure of arguments, compiled and loaded.

    Parameters
    ----------
    config : KernelConfig
        Which variant.
    device : int
        Where it is to run.
    """

    def __init__(self, config: KernelConfig, device: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            rule = "the first call of a kernel on a device must be outside of one"
            refuse(config.name, "captured in a CUDA graph", rule)
        core = cuda_core()
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability(device)
        self._library = core.ObjectCode.from_cubin(compile_cubin(config.source(), f"sm_{major}{minor}a", config.name))
        kernel = self._library.get_kernel(config.name.partition("_")[0])
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuKernelSetAttribute(dynamic, config.shared_bytes, kernel.handle, device)[0])
        self._function = driver.CUfunction(int(kernel.handle))
        # The next launch may begin before this one ends: kernels wait for what came before them.
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._launch = driver.CUlaunchConfig()
        self._launch.blockDimX = config.threads
        self._launch.gridDimY = self._launch.gridDimZ = self._launch.blockDimY = self._launch.blockDimZ = 1
        self._launch.sharedMemBytes = config.shared_bytes
        self._launch.attrs, self._launch.numAttrs = [early], 1
        self._lock = threading.Lock()  # of the launch's configuration
        _kernels.append(self)

    def __call__(self, arguments: ctypes.Structure, ctas: int, stream: int) -> None:
        """Launch so many CTAs on a stream."""
        from cuda.bindings import driver

        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with self._lock:
            self._launch.gridDimX, self._launch.hStream = ctas, stream
            (result,) = driver.cuLaunchKernelEx(self._launch, self._function, ctypes.addressof(parameters), 0)
        _check(result)


@functools.cache
def load(config: KernelConfig, device: int) -> Kernel:
    """Return a variant, compiled and loaded by the first call."""
    logger.debug("%s: %s", config.name, config)
    return Kernel(config, device)


def workspace(device: int, stream: int) -> int:
    """Return where there is room for any variant's partial results, and before them for arrivals.

    Arrivals, and parts of CTAs, are absent, all ones, between launches. A graph must not allocate it: it would be
    filled when that graph is replayed, not when another one is. So the first launch outside a graph allocates that of
    graphs, too. It is never freed, and not torch's: a pool of torch's may be that of a graph.
    """
    if torch.cuda.is_current_stream_capturing():
        if (device, _GRAPHS) not in _workspaces:
            refuse("workspace", "captured in a CUDA graph", "the first call on a device must be outside of one")
        stream = _GRAPHS
    elif (device, stream) not in _workspaces:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        for owner in {(device, stream), (device, _GRAPHS)} - _workspaces.keys():
            _workspaces[owner] = _ones(4 * (MAX_ARRIVALS + sms * (CTA_PART_FLOATS + WARP_PART_FLOATS)))
    return _workspaces[device, stream]


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether rows of channels are contiguous, and begin at multiples of 16 bytes."""
    vector = 16 // x.itemsize
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % vector == 0 for stride in x.stride()[:-1])


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has aligned rows."""
    return x if has_aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _ones(nbytes: int) -> int:
    from cuda.bindings import driver

    result, pointer = driver.cuMemAlloc(nbytes)
    if int(result) != 0:
        raise torch.OutOfMemoryError(f"{nbytes} bytes for the kernels' workspace: {result.name}")
    _check(driver.cuMemsetD8(pointer, 0xFF, nbytes)[0])
    _check(driver.cuCtxSynchronize()[0])  # whatever stream is to use it
    return int(pointer)


def _check(result: Any) -> None:
    if int(result) != 0:
        raise RuntimeError(f"CUDA driver: {result.name}")
