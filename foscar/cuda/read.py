"""Launching the streaming read that tells how fast a GPU's memory can be read."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from foscar.cuda.compiler import compile_cubin, cuda_core

THREADS, LOADS = 512, 8
TILE_BYTES = THREADS * LOADS * 16


def source() -> str:
    """Return the translation unit."""
    return (
        '#include "read.cuh"\n'
        f'extern "C" __global__ __launch_bounds__({THREADS})\n'
        "void read(const uint4* data, int tiles, unsigned* total) {\n"
        f"  foscar::read<{THREADS}, {LOADS}>(data, tiles, total);\n"
        "}\n"
    )


@functools.cache
def _function(device: int) -> Any:
    core = cuda_core()
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cubin(source(), f"sm_{major}{minor}", "read")
    kernel = core.ObjectCode.from_cubin(cubin).get_kernel("read")
    return driver.CUfunction(int(kernel.handle)), kernel  # which keeps the function loaded


def read(data: torch.Tensor, total: torch.Tensor, ctas: int) -> None:
    """Read a tensor once and add its 32-bit words, modulo 2**32, to a counter.

    Parameters
    ----------
    data : torch.Tensor
        Contiguous, a multiple of `TILE_BYTES` long.
    total : torch.Tensor
        int32 ``[1]``.
    ctas : int
        Size of the grid; each CTA takes every `ctas`-th tile.
    """
    from cuda.bindings import driver

    device = data.device.index
    arguments = (
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_int(data.nbytes // TILE_BYTES),
        ctypes.c_void_p(total.data_ptr()),
    )
    parameters = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):
        function, _ = _function(device)
        grid, block = (ctas, 1, 1), (THREADS, 1, 1)
        (result,) = driver.cuLaunchKernel(function, *grid, *block, 0, stream, ctypes.addressof(parameters), 0)
    if int(result) != 0:
        raise RuntimeError(f"CUDA driver: {result.name}")
