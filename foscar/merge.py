"""Combining attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foscar._checks import require


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
    require(len(outs) > 0, "outs", list(outs), "must hold at least one tensor")
    require(len(lses) == len(outs), "lses", f"{len(lses)} tensors", f"must be as many as outs, {len(outs)}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        require(out.shape == outs[0].shape, f"outs[{i}].shape", list(out.shape), f"must be {list(outs[0].shape)}")
        require(out.dtype == outs[0].dtype, f"outs[{i}].dtype", out.dtype, f"must be {outs[0].dtype}")
        require(lse.shape == out.shape[:-1], f"lses[{i}].shape", list(lse.shape), f"must be {list(out.shape[:-1])}")
        require(lse.dtype == torch.float32, f"lses[{i}].dtype", lse.dtype, "must be torch.float32")
        for name, tensor in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            require(tensor.device == outs[0].device, f"{name}.device", str(tensor.device), f"must be {outs[0].device}")
    lse = torch.stack(list(lses))
    top = lse.amax(0)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    share = (weights / total.masked_fill(total == 0, 1))[..., None]
    parts = torch.stack(list(outs)).float()
    out = torch.where(share == 0, 0, share * parts).sum(0)
    return out.to(outs[0].dtype), top + total.log()
