"""Launching the append kernel on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from foscar._checks import require
from foscar.cuda.config import AppendConfig
from foscar.cuda.launch import MAX_ARRIVALS, Kernel, workspace
from foscar.layout import PAGE_SIZE, CacheSpec

logger = logging.getLogger("foscar")


class _Arguments(ctypes.Structure):
    """`AppendArguments` in append.cuh."""

    _fields_ = [
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("cu_seqlens", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("seq_ids", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("k_strides", ctypes.c_int64 * 2),
        ("v_strides", ctypes.c_int64 * 2),
        ("positions", ctypes.c_int),
        ("rotary_dim", ctypes.c_int),
        ("is_neox", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("num_pages", ctypes.c_int),
        ("max_seqs", ctypes.c_int),
        ("page_ctas", ctypes.c_int),
        ("block_table_stride", ctypes.c_int),
        ("block_table_columns", ctypes.c_int),
        ("sink_tokens", ctypes.c_int),
        ("recent_tokens", ctypes.c_int),
        ("ring_tokens", ctypes.c_int),
    ]


@functools.cache
def _kernel(config: AppendConfig, device: int) -> Kernel:
    logger.debug("%s for %s", config.name, config.spec)
    return Kernel(config.source(), "append", config.name, config.threads, config.shared_bytes, device)


def launch_arguments(
    spec: CacheSpec,
    arrivals: int,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
) -> tuple[_Arguments, int]:
    """Return the arguments of the launch, and its CTAs. Rows of k and v are contiguous, and aligned to 16 bytes."""
    batch, tokens = block_table.shape[0], k.shape[0]
    page_ctas = min(tokens, tokens // PAGE_SIZE + 2 * batch)  # first_page_cta in append.cuh, after the last sequence
    arguments = _Arguments(
        k.data_ptr(),
        v.data_ptr(),
        pages.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        cu_seqlens.data_ptr(),
        exact.data_ptr(),
        lengths.data_ptr(),
        None if seq_ids is None else seq_ids.data_ptr(),
        arrivals,
        None if cos_sin_cache is None else cos_sin_cache.data_ptr(),
        (ctypes.c_int64 * 2)(*k.stride()[:2]),
        (ctypes.c_int64 * 2)(*v.stride()[:2]),
        *((0, 0) if cos_sin_cache is None else cos_sin_cache.shape),
        is_neox,
        batch,
        pages.shape[0],
        lengths.shape[0],
        page_ctas,
        block_table.stride(0),
        block_table.shape[1],
        spec.sink_tokens,
        spec.recent_tokens,
        spec.ring_tokens,
    )
    return arguments, (page_ctas + (batch if spec.exact_tokens else 0)) * spec.num_kv_heads


def append(
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    is_neox: bool,
    spec: CacheSpec,
) -> None:
    """Launch the kernel; arguments are those of the reference."""
    batch = block_table.shape[0]
    require(batch <= MAX_ARRIVALS, "batch", batch, f"must not exceed {MAX_ARRIVALS}")
    if batch == 0 or k.shape[0] == 0:
        return
    device = k.device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel = _kernel(AppendConfig(spec, k.dtype), device)
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    seq_lens, cu_seqlens = seq_lens.contiguous(), cu_seqlens.contiguous()
    seq_ids = None if seq_ids is None else seq_ids.contiguous()
    cos_sin_cache = None if cos_sin_cache is None else cos_sin_cache.contiguous()
    tensors = (pages, exact, lengths, _rows(k), _rows(v), block_table, seq_lens, cu_seqlens, seq_ids, cos_sin_cache)
    arguments, ctas = launch_arguments(spec, workspace(device, stream), *tensors, is_neox)
    kernel(arguments, ctas, stream)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows of channels are contiguous, and begin at multiples of 16 bytes."""
    vector = 16 // x.itemsize
    aligned = x.stride(2) == 1 and x.stride(0) % vector == x.stride(1) % vector == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
