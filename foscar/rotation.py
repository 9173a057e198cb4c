"""Rotations of keys and values.

A few channels of large magnitude make a token's scale coarse for all others. An orthogonal matrix R spreads them: a
cache holds R x in place of each new x, a query is rotated as keys are, and an output is turned back. Scores and outputs
stay what they were, but for what quantisation does.
"""

from __future__ import annotations

import torch

from foscar._checks import require, require_tensor
from foscar.layout import HEAD_DIMS

_TOLERANCE = 0.01  # bfloat16 rounds entries by up to 2**-9 of them


def hadamard(head_dim: int) -> torch.Tensor:
    """Return the Walsh-Hadamard matrix, float32 ``[head_dim, head_dim]``, symmetric and orthogonal.

    In the order of Sylvester: entry (i, j) is positive if i and j have an even number of bits in common. Of head_dim
    96, which is no power of two, each 32 channels have one of their own.

    Raises
    ------
    ValueError
        If head_dim is not one of those of a cache.
    """
    require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"must be one of {list(HEAD_DIMS)}")
    block = torch.ones(1, 1)
    while head_dim % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.kron(torch.eye(head_dim // len(block)), block * len(block) ** -0.5)


def check_rotation(name: str, matrix: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """Refuse what is not an orthogonal matrix of head_dim rows."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    require_tensor(name, matrix, shape=(head_dim, head_dim), dtypes=dtypes, device=device)
    error = (matrix.double() @ matrix.double().T - torch.eye(head_dim, device=device)).abs().max().item()
    require(error <= _TOLERANCE, name, f"a matrix R with |R R' - 1| up to {error:.3g}", "must be orthogonal")


def rotate(x: torch.Tensor, matrix: torch.Tensor | None, *, back: bool = False) -> torch.Tensor:
    """Rotate rows of x ``[..., head_dim]`` by a matrix, or back; return x itself if there is none.

    The product is the device's own in the dtype of x, to which the matrix is rounded.
    """
    if matrix is None:
        return x
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        matrix = matrix.to(x.dtype)
        return x @ (matrix if back else matrix.T)
