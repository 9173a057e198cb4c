"""Argument checks. Every message names the argument, its value and the rule."""

from __future__ import annotations

from typing import Any

import torch


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raise a ValueError that names the argument, its value and the rule, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}={value!r}: {rule}")


def require_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor's rank, sizes (a string stands for any), dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}={type(tensor).__name__}: must be a torch.Tensor")
    wanted = f"[{', '.join(map(str, shape))}]"
    fits = len(shape) == tensor.dim()
    for size, want in zip(tensor.shape, shape, strict=False):
        fits = fits and (isinstance(want, str) or size == want)
    require(fits, f"{name}.shape", list(tensor.shape), f"must be {wanted}")
    require(tensor.dtype in dtypes, f"{name}.dtype", tensor.dtype, f"must be {' or '.join(map(str, dtypes))}")
    require(tensor.device == device, f"{name}.device", str(tensor.device), f"must be {device}, the cache's device")
