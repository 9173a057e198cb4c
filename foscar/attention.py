"""Attention over a quantised cache."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch

from foscar._checks import refuse, require, require_index, require_int, require_tensor
from foscar.cache import MODEL_DTYPES, PagedKVCache, check_seq_ids
from foscar.layout import PAGE_SIZE
from foscar.rotation import rotate


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
    batch = q.shape[0]
    one_token = q.dim() == 3
    wanted = ("batch", "num_q_heads", spec.head_dim) if one_token else ("batch", "q_len", "num_q_heads", spec.head_dim)
    require_tensor("q", q, shape=wanted, dtypes=MODEL_DTYPES, device=cache.device)
    if not one_token and q.shape[1] == 0:
        refuse("q_len", 0, "must be at least 1")
    require_index("block_table", block_table, (batch, "max_pages"), cache.device)
    require_index("seq_lens", seq_lens, (batch,), cache.device)
    check_seq_ids(seq_ids, batch, cache)
    sm_scale = _check_options(q, cache, sm_scale, softcap, window, sinks)
    out = _check_out(q, out)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, rotated = rotate(q, cache.k_rotation), _rotated(out, cache)
    torch.ops.foscar.decode_attention(
        q.unsqueeze(1) if one_token else q,
        cache.pages,
        cache.exact,
        cache.lengths,
        block_table,
        seq_lens,
        seq_ids,
        sinks,
        rotated.unsqueeze(1) if one_token else rotated,
        lse.unsqueeze(1) if one_token else lse,
        cache.recipe,
        sm_scale,
        softcap or None,
        None if window == -1 else window,
    )
    _turn_back(rotated, cache, out)
    return (out, lse) if return_lse else out


@overload
def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    sm_scale: float | None = ...,
    softcap: float | None = ...,
    window: int | None = ...,
    sinks: torch.Tensor | None = ...,
    seq_ids: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    block_tokens: int = ...,
) -> torch.Tensor: ...


@overload
def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    sm_scale: float | None = ...,
    softcap: float | None = ...,
    window: int | None = ...,
    sinks: torch.Tensor | None = ...,
    seq_ids: torch.Tensor | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    block_tokens: int = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    seq_ids: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    block_tokens: int = 4096,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from new tokens to the cached ones before them and, causally, to one another.

    For a prompt in chunks, or one whose beginning is cached. Call it before `append`, while `decode_attention` comes
    after it: here the new tokens are attended to as they are, in the model's precision. Nothing is differentiable.

    Parameters
    ----------
    q : torch.Tensor
        ``[total_tokens, num_q_heads, head_dim]``, bfloat16, float16 or float32, any strides: the new tokens of all
        sequences one after another. Heads are those of `decode_attention`.
    k, v : torch.Tensor
        ``[total_tokens, num_kv_heads, head_dim]``: their keys and values, as `append` takes them; the dtype of q.
    cache : PagedKVCache
        The cache.
    block_table : torch.Tensor
        int32 ``[batch, max_pages]``, as in `decode_attention`.
    seq_lens : torch.Tensor
        int32 ``[batch]``: cached tokens of each sequence, without the new ones, as in `append`.
    cu_seqlens : torch.Tensor
        int32 ``[batch + 1]``: sequence b's new tokens are rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
    sm_scale, softcap, window, sinks, seq_ids, return_lse
        As in `decode_attention`.
    out : torch.Tensor, optional
        Where to write the output: the shape, dtype and device of q, any strides.
    block_tokens : int
        Cached or new tokens to look at together, a multiple of 64: memory grows with it, not with the length of
        sequences. The kernel for Hopper looks at 64, whatever it is.

    Returns
    -------
    out : torch.Tensor
        The shape and dtype of q.
    lse : torch.Tensor
        If return_lse: float32 ``[total_tokens, num_q_heads]``, as in `decode_attention`.

    Raises
    ------
    ValueError
        If an argument does not fit, or a value: lengths and page ids. Nothing is written then. The kernel for Hopper
        looks at values with ``FOSCAR_DEBUG=1`` only, but reads nothing outside of the cache whatever they are.

    Examples
    --------
    >>> import torch, foscar
    >>> spec = foscar.CacheSpec.token_wise(4, num_kv_heads=2, head_dim=64)
    >>> cache = foscar.PagedKVCache(spec, num_pages=2)
    >>> int32 = lambda values: torch.tensor(values, dtype=torch.int32)
    >>> table, q, k = int32([[1, 0]]), torch.randn(70, 8, 64), torch.randn(70, 2, 64)
    >>> for chunk in (slice(0, 40), slice(40, 70)):
    ...     where = table, int32([chunk.start]), int32([0, chunk.stop - chunk.start])
    ...     out = foscar.extend_attention(q[chunk], k[chunk], k[chunk], cache, *where)
    ...     foscar.append(cache, k[chunk], k[chunk], *where)
    >>> out.shape
    torch.Size([30, 8, 64])
    """
    require(isinstance(cache, PagedKVCache), "cache", type(cache).__name__, "must be a foscar.PagedKVCache")
    spec = cache.spec
    require_tensor(
        "q", q, shape=("total_tokens", "num_q_heads", spec.head_dim), dtypes=MODEL_DTYPES, device=cache.device
    )
    for name, x in (("k", k), ("v", v)):
        shape = (q.shape[0], spec.num_kv_heads, spec.head_dim)
        require_tensor(name, x, shape=shape, dtypes=(q.dtype,), device=cache.device)
    require_index("block_table", block_table, ("batch", "max_pages"), cache.device)
    batch = block_table.shape[0]
    require_index("seq_lens", seq_lens, (batch,), cache.device)
    require_index("cu_seqlens", cu_seqlens, (batch + 1,), cache.device)
    check_seq_ids(seq_ids, batch, cache)
    require_int("block_tokens", block_tokens, PAGE_SIZE)
    require(block_tokens % PAGE_SIZE == 0, "block_tokens", block_tokens, f"must be a multiple of {PAGE_SIZE}")
    sm_scale = _check_options(q, cache, sm_scale, softcap, window, sinks)
    out = _check_out(q, out)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    rotated = _rotated(out, cache)
    torch.ops.foscar.extend_attention(
        rotate(q, cache.k_rotation),
        rotate(k, cache.k_rotation),
        rotate(v, cache.v_rotation),
        cache.pages,
        cache.exact,
        cache.lengths,
        block_table,
        seq_lens,
        cu_seqlens,
        seq_ids,
        sinks,
        rotated,
        lse,
        cache.recipe,
        sm_scale,
        softcap or None,
        None if window == -1 else window,
        block_tokens,
    )
    _turn_back(rotated, cache, out)
    return (out, lse) if return_lse else out


def _check_options(
    q: torch.Tensor,
    cache: PagedKVCache,
    sm_scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> float:
    """Check what all kinds of attention take; return the factor of the scores."""
    spec, num_q_heads = cache.spec, q.shape[-2]
    if num_q_heads == 0 or num_q_heads % spec.num_kv_heads:
        refuse("num_q_heads", num_q_heads, f"must be a positive multiple of num_kv_heads, {spec.num_kv_heads}")
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
    return sm_scale


def _check_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    require_tensor("out", out, shape=tuple(q.shape), dtypes=(q.dtype,), device=q.device)
    if 0 in out.stride() and out.numel() > 1:
        refuse("out.stride()", out.stride(), "must give each element a place of its own")
    return out


def _rotated(out: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
    """Where to attend to: `out` itself, unless values are rotated."""
    return out if cache.v_rotation is None else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _turn_back(rotated: torch.Tensor, cache: PagedKVCache, out: torch.Tensor) -> None:
    if cache.v_rotation is not None:
        out.copy_(rotate(rotated, cache.v_rotation, back=True))
