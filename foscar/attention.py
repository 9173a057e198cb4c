"""Decode attention over a quantised cache."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch

from foscar._checks import refuse, require, require_index, require_int, require_tensor
from foscar.cache import MODEL_DTYPES, PagedKVCache, check_seq_ids


@overload
def decode_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = ...,
    softcap: float | None = ...,
    window: int | None = ...,
    sinks: torch.Tensor | None = ...,
    seq_ids: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def decode_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = ...,
    softcap: float | None = ...,
    window: int | None = ...,
    sinks: torch.Tensor | None = ...,
    seq_ids: torch.Tensor | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def decode_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    seq_ids: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to the cached tokens of each sequence.

    Query token t of the `q_len` tokens given for a sequence is its token ``seq_len - q_len + t``, and sees the keys up
    to itself. Scale and offset of the codes are folded into the query, the scores, the probabilities or the output;
    accumulation is in float32. Nothing is differentiable.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch, num_q_heads, head_dim]`` or ``[batch, q_len, num_q_heads, head_dim]``, bfloat16, float16 or float32,
        any strides. num_q_heads is a multiple of the cache's num_kv_heads: query head h reads KV head
        ``h // (num_q_heads // num_kv_heads)``.
    cache : PagedKVCache
        The cache.
    block_table : torch.Tensor
        int32 ``[batch, max_pages]``: token p of sequence b is in page ``block_table[b, p // 64]``. Only columns of
        pages that hold tokens to be seen are looked at.
    seq_lens : torch.Tensor
        int32 ``[batch]``: keys of each sequence, those of its query tokens included; 0 is allowed.
    sm_scale : float, optional
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    softcap : float, optional
        If given, and not 0, a scaled score s becomes ``softcap * tanh(s / softcap)``.
    window : int, optional
        If given, a query at position i sees no keys before ``i - window``, as `window_left` in FlashInfer: itself and
        `window` others. -1 means no limit. A model's `sliding_window` of N tokens is a window of N - 1.
    sinks : torch.Tensor, optional
        float ``[num_q_heads]``: a logit for each head that takes part in the softmax's denominator, unscaled, and has
        no value. Of several calls whose results are merged, one should be given it.
    seq_ids : torch.Tensor, optional
        int32 ``[batch]``, as in `foscar.append`.
    return_lse : bool
        Whether to return the log-sum-exp too.
    out : torch.Tensor, optional
        Where to write the output: the shape, dtype and device of q, any strides.

    Returns
    -------
    out : torch.Tensor
        The shape and dtype of q; 0 for a query that sees no key.
    lse : torch.Tensor
        If return_lse: float32, the shape of q without head_dim: the natural logarithm of the softmax's denominator,
        sinks included; -inf for a query that sees no key, whatever its sink.

    Raises
    ------
    ValueError
        If an argument does not fit, or, in the reference backend or with ``FOSCAR_DEBUG=1``, a value: lengths and page
        ids. Nothing is written then. The kernel refuses a batch of 2**31 pages and KV heads or more, and to be captured
        in a CUDA graph before its first call outside of one.

    Examples
    --------
    >>> import torch, foscar
    >>> spec = foscar.CacheSpec.token_wise(4, num_kv_heads=2, head_dim=64)
    >>> cache = foscar.PagedKVCache(spec, num_pages=2)
    >>> block_table = torch.tensor([[1, 0]], dtype=torch.int32)
    >>> k = v = torch.randn(100, 2, 64)
    >>> empty, ends = torch.tensor([0], dtype=torch.int32), torch.tensor([0, 100], dtype=torch.int32)
    >>> foscar.append(cache, k, v, block_table, empty, ends)
    >>> foscar.decode_attention(torch.randn(1, 8, 64), cache, block_table, ends[1:]).shape
    torch.Size([1, 8, 64])
    """
    require(isinstance(cache, PagedKVCache), "cache", type(cache).__name__, "must be a foscar.PagedKVCache")
    spec = cache.spec
    if not isinstance(q, torch.Tensor) or q.dim() not in (3, 4):
        shape = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        refuse("q", shape, "must be a tensor of 3 or 4 dimensions")
    batch, num_q_heads = q.shape[0], q.shape[-2]
    one_token = q.dim() == 3
    wanted = ("batch", "num_q_heads", spec.head_dim) if one_token else ("batch", "q_len", "num_q_heads", spec.head_dim)
    require_tensor("q", q, shape=wanted, dtypes=MODEL_DTYPES, device=cache.device)
    if num_q_heads == 0 or num_q_heads % spec.num_kv_heads:
        refuse("num_q_heads", num_q_heads, f"must be a positive multiple of num_kv_heads, {spec.num_kv_heads}")
    if not one_token and q.shape[1] == 0:
        refuse("q_len", 0, "must be at least 1")
    require_index("block_table", block_table, (batch, "max_pages"), cache.device)
    require_index("seq_lens", seq_lens, (batch,), cache.device)
    check_seq_ids(seq_ids, batch, cache)
    if sm_scale is None:
        sm_scale = 1 / math.sqrt(spec.head_dim)
    elif not isinstance(sm_scale, (int, float)) or not abs(sm_scale) < math.inf:
        refuse("sm_scale", sm_scale, "must be a finite float")
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 <= softcap < math.inf):
        refuse("softcap", softcap, "must be a finite float, positive, or 0 or None for no cap")
    if window is not None:
        require_int("window", window, -1)
    if sinks is not None:
        require_tensor("sinks", sinks, shape=(num_q_heads,), dtypes=MODEL_DTYPES, device=cache.device)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        require_tensor("out", out, shape=tuple(q.shape), dtypes=(q.dtype,), device=cache.device)
        if 0 in out.stride() and out.numel() > 1:
            refuse("out.stride()", out.stride(), "must give each element a place of its own")
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    torch.ops.foscar.decode_attention(
        q.unsqueeze(1) if one_token else q,
        cache.pages,
        cache.exact,
        cache.lengths,
        block_table,
        seq_lens,
        seq_ids,
        sinks,
        out.unsqueeze(1) if one_token else out,
        lse.unsqueeze(1) if one_token else lse,
        cache.recipe,
        sm_scale,
        softcap or None,
        None if window == -1 else window,
    )
    return (out, lse) if return_lse else out
