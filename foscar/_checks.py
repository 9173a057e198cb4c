"""Argument checks. Every message names the argument, its value and the rule."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch


def may_wait() -> bool:
    """Whether to wait for a GPU to check values: if FOSCAR_DEBUG=1, but not while a CUDA graph is captured."""
    return os.environ.get("FOSCAR_DEBUG") == "1" and not torch.cuda.is_current_stream_capturing()


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    """Raise a ValueError that names the argument, its value and the rule."""
    raise ValueError(f"{name}={value!r}: {rule}")


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Refuse the value unless `condition` holds. Where calls are many and rules are long, test first, then refuse."""
    if not condition:
        refuse(name, value, rule)


def require_int(name: str, value: Any, least: int) -> None:
    """Check an int, a bool not being one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        refuse(name, value, f"must be an int of at least {least}")


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
        refuse(name, type(tensor).__name__, "must be a torch.Tensor")
    fits = len(shape) == tensor.dim()
    for size, want in zip(tensor.shape, shape, strict=False):
        fits = fits and (isinstance(want, str) or size == want)
    if not fits:
        refuse(f"{name}.shape", list(tensor.shape), f"must be [{', '.join(map(str, shape))}]")
    if tensor.dtype not in dtypes:
        refuse(f"{name}.dtype", tensor.dtype, f"must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        refuse(f"{name}.device", str(tensor.device), f"must be {device}, the cache's device")


def require_index(name: str, tensor: torch.Tensor, shape: tuple[int | str, ...], device: torch.device) -> None:
    """Check an int32 tensor."""
    require_tensor(name, tensor, shape=shape, dtypes=(torch.int32,), device=device)
