"""Launching the append kernel on torch's current stream."""

from __future__ import annotations

import ctypes

import torch

from foscar._checks import require
from foscar.cuda.config import AppendConfig
from foscar.cuda.launch import MAX_ARRIVALS, aligned_rows, load, workspace
from foscar.layout import CacheSpec

_FEW_TOKENS = 4  # of a sequence


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
        ("k_rotation", ctypes.c_void_p),
        ("v_rotation", ctypes.c_void_p),
        ("k_strides", ctypes.c_int64 * 2),
        ("v_strides", ctypes.c_int64 * 2),
        ("positions", ctypes.c_int),
        ("rotary_dim", ctypes.c_int),
        ("is_neox", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("num_pages", ctypes.c_int),
        ("max_seqs", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("by_warps", ctypes.c_int),
        ("block_table_stride", ctypes.c_int),
        ("block_table_columns", ctypes.c_int),
        ("sink_tokens", ctypes.c_int),
        ("recent_tokens", ctypes.c_int),
        ("ring_tokens", ctypes.c_int),
    ]


def best_by_warps(spec: CacheSpec, tokens: int, batch: int) -> bool:
    """Return whether teams had better be warps: sequences get few tokens each, and blocks are not pages."""
    return tokens <= _FEW_TOKENS * batch and not spec.block_wise


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def launch_arguments(
    config: AppendConfig,
    by_warps: bool,
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
    k_rotation: torch.Tensor | None,
    v_rotation: torch.Tensor | None,
) -> tuple[_Arguments, int]:
    """Return the arguments of the launch, and its CTAs. Rows of k and v are contiguous, and aligned to 16 bytes."""
    spec, batch, tokens = config.spec, block_table.shape[0], k.shape[0]
    # first_block in append.cuh, after the last sequence
    blocks = min(tokens, tokens // config.block_tokens(by_warps) + 2 * batch)
    arguments = _Arguments(
        k.data_ptr(),
        v.data_ptr(),
        pages.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        cu_seqlens.data_ptr(),
        exact.data_ptr(),
        lengths.data_ptr(),
        _pointer(seq_ids),
        arrivals,
        *map(_pointer, (cos_sin_cache, k_rotation, v_rotation)),
        (ctypes.c_int64 * 2)(*k.stride()[:2]),
        (ctypes.c_int64 * 2)(*v.stride()[:2]),
        *((0, 0) if cos_sin_cache is None else cos_sin_cache.shape),
        is_neox,
        batch,
        pages.shape[0],
        lengths.shape[0],
        blocks,
        by_warps,
        block_table.stride(0),
        block_table.shape[1],
        spec.sink_tokens,
        spec.recent_tokens,
        spec.ring_tokens,
    )
    units = (blocks + (batch if spec.exact_tokens else 0)) * spec.num_kv_heads
    return arguments, -(-units * 32 // config.threads) if by_warps else units


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
    k_rotation: torch.Tensor | None,
    v_rotation: torch.Tensor | None,
    spec: CacheSpec,
) -> None:
    """Launch the kernel; arguments are those of the reference."""
    batch = block_table.shape[0]
    require(batch <= MAX_ARRIVALS, "batch", batch, f"must not exceed {MAX_ARRIVALS}")
    if batch == 0 or k.shape[0] == 0:
        return
    device = k.device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    config = AppendConfig(spec, k.dtype, k_rotation is not None, v_rotation is not None)
    kernel = load(config, device)
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    seq_lens, cu_seqlens = seq_lens.contiguous(), cu_seqlens.contiguous()
    seq_ids = None if seq_ids is None else seq_ids.contiguous()
    cos_sin_cache = None if cos_sin_cache is None else cos_sin_cache.contiguous()
    rotations = [None if matrix is None else matrix.to(k.dtype) for matrix in (k_rotation, v_rotation)]
    tensors = (pages, exact, lengths, aligned_rows(k), aligned_rows(v), block_table, seq_lens, cu_seqlens, seq_ids)
    by_warps = best_by_warps(spec, k.shape[0], batch)
    arrivals = workspace(device, stream)
    arguments, ctas = launch_arguments(config, by_warps, arrivals, *tensors, cos_sin_cache, is_neox, *rotations)
    kernel(arguments, ctas, stream)
