"""Launching the decode kernel on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator

import torch

from foscar._checks import refuse
from foscar.cuda.config import CTA_PART_FLOATS, LONGEST_WINDOW, MAX_ROWS, DecodeConfig
from foscar.cuda.launch import MAX_ARRIVALS, Kernel, aligned_rows, load, workspace
from foscar.layout import CacheSpec

logger = logging.getLogger("foscar")


class _Arguments(ctypes.Structure):
    """`DecodeArguments` in types.cuh."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("seq_ids", ctypes.c_void_p),
        ("cta_parts", ctypes.c_void_p),
        ("warp_parts", ctypes.c_void_p),
        ("q_strides", ctypes.c_int64 * 3),
        ("out_strides", ctypes.c_int64 * 3),
        ("lse_strides", ctypes.c_int64 * 2),
        ("batch", ctypes.c_int),
        ("q_len", ctypes.c_int),
        ("tail", ctypes.c_int),
        ("group", ctypes.c_int),
        ("heads_per_kv", ctypes.c_int),
        ("group_inverse", ctypes.c_int),
        ("block_table_stride", ctypes.c_int),
        ("block_table_columns", ctypes.c_int),
        ("window_left", ctypes.c_int),
        ("sink_tokens", ctypes.c_int),
        ("ring_tokens", ctypes.c_int),
        ("sm_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


@functools.cache
def _variants(spec: CacheSpec, dtype: torch.dtype, rows: int, device: int) -> list[tuple[DecodeConfig, Kernel]]:
    """Return what serves much work, and what serves little: a first call loads both, as no graph can load one."""
    configs = [DecodeConfig.choose(spec, dtype, rows, small) for small in (False, True)]
    return [(config, load(config, device)) for config in configs]


def is_small(spec: CacheSpec, batch: int, columns: int, sms: int) -> bool:
    """Return whether work is little for so many SMs, even if all sequences are as long as block tables allow.

    With less than that, an SM's warps had better be those of one CTA: the fewer CTAs, the fewer parts to merge.
    """
    return 8 * sms <= batch * columns * spec.num_kv_heads <= 96 * sms


def _row_block(q: torch.Tensor, spec: CacheSpec) -> tuple[int, int]:
    """How many query heads of a KV head, and query tokens, one launch attends with."""
    heads_per_kv = q.shape[2] // spec.num_kv_heads
    return min(heads_per_kv, MAX_ROWS), min(max(MAX_ROWS // heads_per_kv, 1), q.shape[1])


def launches(
    config: DecodeConfig,
    grid: int,
    parts: int,
    q: torch.Tensor,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    softcap: float | None,
    window_left: int | None,
) -> Iterator[_Arguments]:
    """Yield the arguments of each launch, whose rows of channels are contiguous, q's aligned to 16 bytes."""
    spec = config.spec
    heads_at_once, tokens_at_once = _row_block(q, spec)
    heads_per_kv = q.shape[2] // spec.num_kv_heads
    for token in range(0, q.shape[1], tokens_at_once):
        for head in range(0, heads_per_kv, heads_at_once):
            group = min(heads_at_once, heads_per_kv - head)
            yield _Arguments(
                q.data_ptr() + (token * q.stride(1) + head * q.stride(2)) * q.itemsize,
                pages.data_ptr(),
                block_table.data_ptr(),
                seq_lens.data_ptr(),
                None if sinks is None else sinks.data_ptr() + 4 * head,
                out.data_ptr() + (token * out.stride(1) + head * out.stride(2)) * out.itemsize,
                lse.data_ptr() + 4 * (token * lse.stride(1) + head),
                exact.data_ptr(),
                lengths.data_ptr(),
                None if seq_ids is None else seq_ids.data_ptr(),
                parts,
                parts + 4 * grid * CTA_PART_FLOATS,
                (ctypes.c_int64 * 3)(*q.stride()[:3]),
                (ctypes.c_int64 * 3)(*out.stride()[:3]),
                (ctypes.c_int64 * 2)(*lse.stride()[:2]),
                q.shape[0],
                min(tokens_at_once, q.shape[1] - token),
                q.shape[1] - token,
                group,
                heads_per_kv,
                -(-(1 << 16) // group),
                block_table.stride(0),
                block_table.shape[1],
                -1 if window_left is None else min(window_left, LONGEST_WINDOW),
                spec.sink_tokens,
                spec.ring_tokens,
                sm_scale,
                softcap or 0.0,
            )


def decode_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    exact: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_ids: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: CacheSpec,
    sm_scale: float,
    softcap: float | None,
    window_left: int | None,
) -> None:
    """Launch the kernel; arguments are those of the reference. More than 8 rows of a KV head take several launches."""
    device = q.device.index
    batch = q.shape[0]
    if batch == 0:
        return
    heads_at_once, tokens_at_once = _row_block(q, spec)
    stream = torch.cuda.current_stream(device).cuda_stream
    columns = block_table.shape[1]
    if batch * (max(columns, 1) + (spec.exact_tokens + 16) // 8) * spec.num_kv_heads >= 2**31:  # units, at most
        refuse("block_table.shape", list(block_table.shape), "times num_kv_heads must be below 2**31")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    variants = _variants(spec, q.dtype, heads_at_once * tokens_at_once, device)
    config, kernel = variants[is_small(spec, batch, columns, sms)]
    q = aligned_rows(q)
    target = out if out.stride(3) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    seq_lens = seq_lens.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    seq_ids = None if seq_ids is None else seq_ids.contiguous()
    logger.debug("decode_attention: %s, %s query, %d pages a sequence", config.name, tuple(q.shape), columns)
    tensors = (q, pages, exact, lengths, block_table, seq_lens, seq_ids, sinks, target, lse)
    parts = workspace(device, stream) + 4 * MAX_ARRIVALS
    for arguments in launches(config, sms, parts, *tensors, sm_scale, softcap, window_left):
        kernel(arguments, sms, stream)
    if target is not out:
        out.copy_(target)
