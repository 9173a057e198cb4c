"""Launching the kernel that extends on torch's current stream."""

from __future__ import annotations

import ctypes
import logging

import torch

from foscar._checks import require
from foscar.cuda.config import LONGEST_WINDOW, ExtendConfig
from foscar.cuda.launch import aligned_rows, has_aligned_rows, load
from foscar.layout import CacheSpec
from foscar.merge import merge_lses

logger = logging.getLogger("foscar")

_LEAST_COLUMNS = 8  # of a split


class _Arguments(ctypes.Structure):
    """`ExtendArguments` in extend.cuh."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("cu_seqlens", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("seq_ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("q_strides", ctypes.c_int64 * 2),
        ("k_strides", ctypes.c_int64 * 2),
        ("v_strides", ctypes.c_int64 * 2),
        ("out_strides", ctypes.c_int64 * 2),
        ("batch", ctypes.c_int),
        ("total_tokens", ctypes.c_int),
        ("num_pages", ctypes.c_int),
        ("max_seqs", ctypes.c_int),
        ("group", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("block_table_stride", ctypes.c_int),
        ("block_table_columns", ctypes.c_int),
        ("window_left", ctypes.c_int),
        ("sink_tokens", ctypes.c_int),
        ("ring_tokens", ctypes.c_int),
        ("sm_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


def tiles_of(config: ExtendConfig, q: torch.Tensor, batch: int) -> int:
    """Return how many tiles of query rows a KV head has, at most: `first_tile` in extend.cuh, of the sequences' end."""
    return q.shape[0] * (q.shape[1] // config.spec.num_kv_heads) // config.tile_rows + batch


def splits_of(config: ExtendConfig, q: torch.Tensor, block_table: torch.Tensor, sms: int) -> int:
    """Return into how many parts keys are split, so that few tiles occupy all SMs."""
    batch, columns = block_table.shape
    tiles = tiles_of(config, q, batch) * config.spec.num_kv_heads
    return max(min(config.ctas * sms // tiles, columns // _LEAST_COLUMNS), 1)


def launch_arguments(
    config: ExtendConfig,
    splits: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    softcap: float | None,
    window_left: int | None,
) -> tuple[_Arguments, int]:
    """Return the arguments of the launch, and its CTAs.

    Rows of q, k and v are contiguous, and aligned to 16 bytes. If there are splits, `out` and `lse` have one more
    dimension, the first.
    """
    spec, batch = config.spec, block_table.shape[0]
    tiles = tiles_of(config, q, batch)
    ctas = tiles * splits * spec.num_kv_heads
    require(ctas < 2**31, "total_tokens", q.shape[0], "times num_q_heads / tile_rows must be below 2**31")
    arguments = _Arguments(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pages.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        cu_seqlens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        exact.data_ptr(),
        lengths.data_ptr(),
        None if seq_ids is None else seq_ids.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        (ctypes.c_int64 * 2)(*q.stride()[:2]),
        (ctypes.c_int64 * 2)(*k.stride()[:2]),
        (ctypes.c_int64 * 2)(*v.stride()[:2]),
        (ctypes.c_int64 * 2)(*out.stride()[-3:-1]),
        batch,
        q.shape[0],
        pages.shape[0],
        exact.shape[0],
        q.shape[1] // spec.num_kv_heads,
        tiles,
        splits,
        block_table.stride(0),
        block_table.shape[1],
        -1 if window_left is None else min(window_left, LONGEST_WINDOW),
        spec.sink_tokens,
        spec.ring_tokens,
        sm_scale,
        softcap or 0.0,
    )
    return arguments, ctas


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: CacheSpec,
    sm_scale: float,
    softcap: float | None,
    window_left: int | None,
    block_tokens: int,
) -> None:
    """Launch the kernel; arguments are those of the reference. It looks at 64 keys at a time, whatever `block_tokens`.

    If keys are split, which happens where rows are few, results of splits are merged by PyTorch.
    """
    device = q.device.index
    if block_table.shape[0] == 0 or q.shape[0] == 0:
        return
    rows = q.shape[0] * q.shape[1] // (spec.num_kv_heads * block_table.shape[0])  # of a sequence, on the average
    config = ExtendConfig.choose(spec, q.dtype, rows)
    kernel = load(config, device)
    splits = splits_of(config, q, block_table, torch.cuda.get_device_properties(device).multi_processor_count)
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    seq_lens, cu_seqlens = seq_lens.contiguous(), cu_seqlens.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    seq_ids = None if seq_ids is None else seq_ids.contiguous()
    logger.debug("extend_attention: %s, %s query, %d splits", config.name, tuple(q.shape), splits)
    outs, lses = out, lse
    if splits > 1:
        outs = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
        lses = torch.empty(splits, *q.shape[:-1], dtype=torch.float32, device=q.device)
    elif not has_aligned_rows(out):
        outs = torch.empty_like(out, memory_format=torch.contiguous_format)
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v)
    tables = (block_table, seq_lens, cu_seqlens, seq_ids, sinks)
    options = (sm_scale, softcap, window_left)
    arguments, ctas = launch_arguments(config, splits, q, k, v, pages, exact, lengths, *tables, outs, lses, *options)
    kernel(arguments, ctas, torch.cuda.current_stream(device).cuda_stream)
    if splits > 1:
        # Where a split sees no key it has left zeros.
        shares, merged = merge_lses(lses)
        outs = torch.einsum("s...,s...d->...d", shares, outs)
        lse.copy_(merged)
    if outs is not out:
        out.copy_(outs)
