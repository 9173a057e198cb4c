"""Asymmetric min/max quantisation to 2 or 4 bits.

A group of values shares a scale ``s`` and an offset ``z``; a code ``c`` stands for ``s * c + z``. Both are kept in one
32-bit word: its low half is the offset, a bfloat16. Token-wise, the scale is the whole word, read as a float32: a
kernel gets both without a conversion, and the scale is within 2**-8 of the ideal one. Channel-wise, it is the high
half, a bfloat16: a kernel multiplies pairs of channels by it. Codes are computed with the scale and offset *as they
will be read*, so that the rounding of either is made up for.

docs/numerics.md has the measurements behind this choice.
"""

from __future__ import annotations

import torch

from foscar.layout import Axis, QuantSpec

BF16_MAX = torch.finfo(torch.bfloat16).max
# Scales are at least this in magnitude, so that a kernel may bound p * scale instead of p. A group of smaller range is
# as good as constant.
LEAST_SCALE = 2.0**-60
_HIGH_HALF = -0x10000
_SIGN = -0x80000000


def check_finite(name: str, x: torch.Tensor) -> None:
    """Raise a ValueError that gives the position of the first value that cannot be stored."""
    bad = ~(x.float().abs() <= BF16_MAX)
    if bad.any():
        position = bad.nonzero()[0].tolist()
        value = x[tuple(position)].item()
        raise ValueError(f"{name}{position}={value}: must be finite and at most bfloat16's maximum, {BF16_MAX:.4g}")


def quantize(
    x: torch.Tensor, spec: QuantSpec, descending: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise finite values.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., tokens, head_dim]``, any float dtype. Channel-wise, `tokens` is one block of 64.
    spec : QuantSpec
        With its group size filled in, as a CacheSpec holds it.
    descending : torch.Tensor, optional
        bool ``[tokens, 1 ...]``, token-wise: tokens whose codes count down from their offset, by a negative scale.

    Returns
    -------
    codes : torch.Tensor
        uint8, the shape of x.
    words : torch.Tensor
        int32, scale and offset: token-wise ``[..., tokens, groups]``, channel-wise ``[..., head_dim]``.
    """
    x = x.float()
    row = -1 if spec.axis == "token" else -2
    if spec.clip < 1:
        limit = x.abs().sort(dim=row).values.narrow(row, spec.clip_rank(x.shape[row]), 1)
        x = x.clamp(-limit, limit)
    grouped = x.unflatten(-1, (-1, spec.group_size)) if spec.axis == "token" else x
    sign = grouped.new_ones(()) if descending is None else torch.where(descending, -1.0, 1.0)[..., None]
    grouped = grouped * sign
    low, high = grouped.amin(row, keepdim=True), grouped.amax(row, keepdim=True)
    offset = _round_down_to_bf16(low + 0.0)  # of zeros of both signs, which is the least is up to the machine
    # Halves, because a difference can exceed float32's range.
    ideal_scale = (0.5 * high - 0.5 * offset) / spec.levels * 2
    words = _pack_words(ideal_scale, sign * offset, spec.axis)
    scale, _ = unpack_words(words, spec.axis)
    codes = ((0.5 * grouped - 0.5 * offset) / (0.5 * scale)).round().clamp(0, spec.levels).to(torch.uint8)
    words = torch.where(sign < 0, words | _SIGN, words)
    return codes.view(x.shape), words.squeeze(row)


def unpack_words(words: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 scale and offset that int32 words hold."""
    scale = words if axis == "token" else words & _HIGH_HALF
    return scale.view(torch.float32), (words << 16).view(torch.float32)


def _round_down_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 values to the next bfloat16 that is not larger, as float32."""
    bits = x.contiguous().view(torch.int32)
    toward_zero = (bits & _HIGH_HALF).view(torch.float32)
    away = ((bits & _HIGH_HALF) + 0x10000).view(torch.float32)
    return torch.where(toward_zero > x, away, toward_zero)


def _pack_words(scale: torch.Tensor, offset: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Words whose low half is the offset and that are read as the scale nearest to the one wanted."""
    low = (offset.view(torch.int32) >> 16) & 0xFFFF
    high = (scale.clamp(min=2 * LEAST_SCALE).view(torch.int32) - (low if axis == "token" else 0) + 0x8000) >> 16
    return (high << 16) | low
