"""Combining attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foscar._checks import refuse


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention outputs over disjoint sets of keys into that over their union.

    A sink logit belongs in one of them only, or it counts as often as it is given.

    Parameters
    ----------
    outs : sequence of torch.Tensor
        At least one output ``[..., head_dim]``, all of one shape, dtype and device.
    lses : sequence of torch.Tensor
        As many float32 tensors ``[...]``: the natural logarithm of each softmax's denominator, -inf where the set is
        empty; what `out` holds there is ignored.

    Returns
    -------
    out : torch.Tensor
        ``[..., head_dim]`` in the dtype of the inputs; 0 where every set is empty.
    lse : torch.Tensor
        float32 ``[...]``; -inf where every set is empty.

    Raises
    ------
    ValueError
        If counts, shapes, dtypes or devices do not fit each other.

    Examples
    --------
    >>> import torch, foscar
    >>> one, zero = torch.ones(1, 4), torch.zeros(1, 4)
    >>> out, lse = foscar.merge_states([one, zero], [torch.zeros(1), torch.zeros(1)])
    >>> out[0, 0].item(), round(lse.item(), 4)
    (0.5, 0.6931)
    """
    if len(outs) == 0:
        refuse("len(outs)", 0, "must be at least 1")
    if len(lses) != len(outs):
        refuse("len(lses)", len(lses), f"must be that of outs, {len(outs)}")
    shape, dtype, device = outs[0].shape, outs[0].dtype, outs[0].device
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != shape:
            refuse(f"outs[{i}].shape", list(out.shape), f"must be {list(shape)}")
        if out.dtype != dtype:
            refuse(f"outs[{i}].dtype", out.dtype, f"must be {dtype}")
        if lse.shape != shape[:-1]:
            refuse(f"lses[{i}].shape", list(lse.shape), f"must be {list(shape[:-1])}")
        if lse.dtype != torch.float32:
            refuse(f"lses[{i}].dtype", lse.dtype, "must be torch.float32")
        if out.device != device or lse.device != device:
            refuse(f"device of outs[{i}], lses[{i}]", f"{out.device}, {lse.device}", f"must be {device}")
    shares, lse = merge_lses(torch.stack(list(lses)))
    parts = torch.stack(list(outs)).float()
    out = torch.where(shares[..., None] == 0, 0, shares[..., None] * parts).sum(0)
    return out.to(outs[0].dtype), lse


def merge_lses(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of each set in their union, ``[sets, ...]``, and the union's log-sum-exp."""
    # Shares add up to 1, whatever the rounding of a large log-sum-exp.
    return torch.softmax(lses, 0).masked_fill(lses == -torch.inf, 0), torch.logsumexp(lses, 0)
