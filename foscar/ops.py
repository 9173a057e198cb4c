"""The `torch.library` operators behind the public functions, and the choice of backend.

Where the caller owns a buffer an operator writes into it, so that `torch.compile` and CUDA graphs see every tensor.
A cache's spec travels as ``str(spec)``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from foscar._checks import may_wait
from foscar.layout import CacheSpec
from foscar.reference import attention, cache

logger = logging.getLogger("foscar")

_SCHEMAS = {
    "foscar::append": """(
        Tensor(a!) pages, Tensor(b!) exact, Tensor(c!) lengths, Tensor k, Tensor v,
        Tensor block_table, Tensor seq_lens, Tensor cu_seqlens, Tensor? seq_ids,
        Tensor? cos_sin_cache, bool is_neox, Tensor? k_rotation, Tensor? v_rotation, str spec) -> ()""",
    "foscar::decode_attention": """(
        Tensor q, Tensor pages, Tensor exact, Tensor lengths,
        Tensor block_table, Tensor seq_lens, Tensor? seq_ids, Tensor? sinks, Tensor(a!) out, Tensor(b!) lse,
        str spec, float sm_scale, float? softcap, int? window_left) -> ()""",
    "foscar::extend_attention": """(
        Tensor q, Tensor k, Tensor v, Tensor pages, Tensor exact, Tensor lengths,
        Tensor block_table, Tensor seq_lens, Tensor cu_seqlens, Tensor? seq_ids, Tensor? sinks,
        Tensor(a!) out, Tensor(b!) lse,
        str spec, float sm_scale, float? softcap, int? window_left, int block_tokens) -> ()""",
    "foscar::dequantize": """(
        Tensor pages, Tensor exact, Tensor lengths,
        Tensor block_table, Tensor seq_lens, Tensor? seq_ids, str spec) -> (Tensor, Tensor)""",
}

for _name, _schema in _SCHEMAS.items():
    torch.library.define(_name, " ".join(_schema.split()))


def _with_spec(function: Callable[..., Any]) -> Callable[..., Any]:
    """Read the one string among the arguments back as a CacheSpec. Nothing is differentiable or autocast."""

    @torch.no_grad()
    def call(*args: Any) -> Any:
        with torch.autocast(args[0].device.type, enabled=False):
            return function(*(CacheSpec.parse(arg) if isinstance(arg, str) else arg for arg in args))

    return call


def backend(spec: CacheSpec, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """Return which backend attends to a cache of `spec` for a query of `dtype`, and why."""
    if device.type != "cuda":
        return "reference", "PyTorch, on any device"
    reason = _why_no_kernel(spec, dtype, device)
    if reason is not None:
        return "reference", reason
    from foscar.cuda.config import MAX_ROWS, DecodeConfig

    shapes = [
        DecodeConfig.choose(spec, dtype, *call) for call in ((MAX_ROWS // 2,), (MAX_ROWS,), (MAX_ROWS // 2, True))
    ]
    few, many, small = (f"{config.warps} warps of {config.stages} stages" for config in shapes)
    reason = f"decode kernel: {few} for up to {MAX_ROWS // 2} query rows of a KV head, {many} for more"
    return "cuda", f"{reason}, {small} for little work" if shapes[2].small else reason


@functools.cache
def _why_no_kernel(spec: CacheSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    from foscar.cuda.config import unsupported

    reason = unsupported(spec, dtype, torch.cuda.get_device_capability(device))
    if reason is not None:
        logger.debug("%s on %s: PyTorch, because %s", spec, device, reason)
    return reason


def _has_kernel(q: torch.Tensor, exact: torch.Tensor, spec: CacheSpec) -> bool:
    """Whether a kernel attends, for which exact tokens must have the query's dtype."""
    return _why_no_kernel(spec, q.dtype, q.device) is None and (q.dtype == exact.dtype or not spec.exact_tokens)


def _decode_attention_cuda(
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
    *options: Any,
) -> None:
    attend = attention.decode_attention
    if _has_kernel(q, exact, spec):
        from foscar.cuda import decode

        attend = decode.decode_attention
        if may_wait():
            attention.read_tables(pages, lengths, block_table, seq_lens, seq_ids, spec, q.shape[1], options[-1])
    with torch.cuda.device(q.device):
        attend(q, pages, exact, lengths, block_table, seq_lens, seq_ids, sinks, out, lse, spec, *options)


def _append_cuda(pages: torch.Tensor, exact: torch.Tensor, lengths: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
    write = cache.append
    if torch.cuda.get_device_capability(k.device) == (9, 0):
        from foscar.cuda import append

        write = append.append
        if may_wait():
            cache.plan_append(pages, lengths, k, *rest)
    with torch.cuda.device(k.device):
        write(pages, exact, lengths, k, *rest)


def _extend_attention_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, exact: torch.Tensor, *rest: Any
) -> None:
    lengths, block_table, seq_lens, cu_seqlens, seq_ids, *_, spec, _, _, window_left, _ = rest
    attend = attention.extend_attention
    if _has_kernel(q, exact, spec):
        from foscar.cuda import extend

        attend = extend.extend_attention
        if may_wait():
            cache.read_bounds(cu_seqlens, "q", q.shape[0])
            attention.read_tables(pages, lengths, block_table, seq_lens, seq_ids, spec, 0, window_left)
    with torch.cuda.device(q.device):
        attend(q, k, v, pages, exact, *rest)


torch.library.impl("foscar::append", "cpu", _with_spec(cache.append))
torch.library.impl("foscar::append", "cuda", _with_spec(_append_cuda))
torch.library.impl("foscar::decode_attention", "cpu", _with_spec(attention.decode_attention))
torch.library.impl("foscar::decode_attention", "cuda", _with_spec(_decode_attention_cuda))
torch.library.impl("foscar::extend_attention", "cpu", _with_spec(attention.extend_attention))
torch.library.impl("foscar::extend_attention", "cuda", _with_spec(_extend_attention_cuda))
torch.library.impl("foscar::dequantize", ("cpu", "cuda"), _with_spec(cache.dequantize))


def _nothing(*args: Any) -> None:
    """Meta kernel of an operator that only writes into its arguments."""


def _dequantize_meta(pages: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    spec = CacheSpec.parse(args[-1])
    shape = (torch.library.get_ctx().new_dynamic_size(), spec.num_kv_heads, spec.head_dim)
    return pages.new_empty(shape, dtype=torch.float32), pages.new_empty(shape, dtype=torch.float32)


torch.library.register_fake("foscar::append", _nothing)
torch.library.register_fake("foscar::decode_attention", _nothing)
torch.library.register_fake("foscar::extend_attention", _nothing)
torch.library.register_fake("foscar::dequantize", _dequantize_meta)
