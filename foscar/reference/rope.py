"""Rotary position embedding."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Turn pairs of channels of x ``[tokens, heads, head_dim]`` by their tokens' angles, in float32.

    `cos_sin_cache` and `is_neox` are those of `foscar.append`; channels from rotary_dim on stay as they are.
    """
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    turned = x[..., :rotary_dim].float()
    first, second = turned.chunk(2, -1) if is_neox else turned.unflatten(-1, (-1, 2)).unbind(-1)
    pair = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat([joined.to(x.dtype), x[..., rotary_dim:]], -1)
