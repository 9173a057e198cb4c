"""Compare types for scale and offset by the error they leave; writes docs/data/parameter_types.csv.

Rows: the shipped activations of SmolLM2-135M-Instruct, and uniform values whose mean is a multiple of their range.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

import foscar
from foscar.demo import load_activations
from foscar.reference.quant import quantize, unpack_words

OUTPUT = Path(__file__).parent.parent / "docs" / "data" / "parameter_types.csv"
TYPES = {
    "float32 each": (torch.float32, torch.float32),
    "float16 each": (torch.float16, torch.float16),
    "bfloat16 each": (torch.bfloat16, torch.bfloat16),
    "float16 scale, bfloat16 offset": (torch.float16, torch.bfloat16),
}


def plain(x: torch.Tensor, spec: foscar.QuantSpec, scale_type: torch.dtype, offset_type: torch.dtype) -> torch.Tensor:
    """Min/max quantisation with separately rounded parameters, codes computed with them as rounded."""
    axis = -1 if spec.axis == "token" else -2
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    offset = low.to(offset_type).float()
    scale = ((high - low) / spec.levels).to(scale_type).float()
    codes = ((x - offset) / scale).round().clamp(0, spec.levels)
    return torch.where(scale > 0, scale * codes, 0) + offset


def one_word(x: torch.Tensor, spec: foscar.QuantSpec) -> torch.Tensor:
    """Quantisation as foscar does it."""
    codes, words = quantize(x, spec)
    scale, offset = unpack_words(words, spec.axis)
    if spec.axis == "channel":
        scale, offset = scale[..., None, :], offset[..., None, :]
    return scale * codes + offset


def main() -> None:
    """Write the table."""
    torch.manual_seed(0)
    inputs: list[tuple[str, torch.Tensor]] = []
    for name in ("k", "v"):
        layers = [getattr(layer, name).float().transpose(0, 1).unflatten(1, (-1, 64)) for layer in load_activations()]
        inputs.append((f"SmolLM2 {name}", torch.cat(layers)))
    for ratio in (0, 1, 10, 100, 1000):
        for dtype in (torch.bfloat16, torch.float16):
            x = (torch.rand(4, 64, 64, 64) * 2 - 1 + 2 * ratio).to(dtype).float()
            # bfloat16 cannot tell values apart whose mean is 1000 times their range.
            if x.unique().numel() > 1:
                inputs.append((f"uniform, mean {ratio} x range, {str(dtype)[6:]}", x))
    rows = []
    for name, x in inputs:
        for bits in (2, 4):
            for axis in ("token", "channel"):
                quantiser = foscar.QuantSpec(bits, axis)
                spec = foscar.CacheSpec(quantiser, quantiser, 1, x.shape[-1]).k
                row: dict[str, object] = {"input": name, "bits": bits, "axis": axis}
                centred = (x - x.mean((-1, -2), keepdim=True)).norm()
                for kind, types in TYPES.items():
                    row[kind] = f"{((plain(x, spec, *types) - x).norm() / centred).item():.4f}"
                row["one word"] = f"{((one_word(x, spec) - x).norm() / centred).item():.4f}"
                rows.append(row)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    with OUTPUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
