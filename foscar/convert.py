"""Reading the caches of other projects.

Each function returns the values that the other project's attention sees; `foscar.append` puts them into pages. That
quantises them anew, to the same codes if groups are the same, with scales and offsets as foscar stores them
(docs/format.md): a value changes by no more than 2**-7 of the group's largest magnitude, for an offset in bfloat16, and
2**-8 of its range. Groups that are smaller than foscar's are not kept apart.

Formats are those of the projects' sources in 2026. Rotations are not undone: where keys or values are in a rotated
space, turn queries alike, and outputs back. Values are float32; a cache that keeps exact tokens wants them in the
model's dtype.

>>> import torch, foscar
>>> codes, scales_zeros = torch.randint(256, (2, 100, 8, 32), dtype=torch.uint8), torch.rand(2, 100, 8, 2)
>>> k, v = foscar.convert.oscar(codes, scales_zeros).bfloat16()         # [tokens, num_kv_heads, head_dim] each
>>> manager = foscar.BlockManager(foscar.PagedKVCache(foscar.CacheSpec.token_wise(2, 8, 128), num_pages=2))
>>> seq = manager.new()
>>> manager.append([seq], k, v)
>>> foscar.decode_attention(torch.randn(1, 32, 128).bfloat16(), manager.cache, **manager.tables([seq])).shape
torch.Size([1, 32, 128])
"""

from __future__ import annotations

import torch

from foscar._checks import require, require_tensor


def oscar(codes: torch.Tensor, scales_zeros: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Read 2-bit rows of OSCAR.

    Parameters
    ----------
    codes : torch.Tensor
        uint8 ``[..., head_dim // 4]``. Byte j holds channels j, j + head_dim / 4, … from its lowest bits up, as in its
        SGLang branch.
    scales_zeros : torch.Tensor
        Any float dtype, ``[..., 2 * groups]``: scale and zero of each group of neighbouring channels in turn; a value
        is ``(code - zero) * scale``.
    interleaved : bool
        Whether byte j holds channels 4 j to 4 j + 3, as in its port to vLLM.

    Returns
    -------
    torch.Tensor
        float32 ``[..., head_dim]``.

    Raises
    ------
    ValueError
        If a shape or a dtype does not fit.

    Notes
    -----
    ``kv_quant_kernels.py`` of the branch sglang-research, and ``oscar_ops.py`` of vLLM's pull request 46774.
    """
    fields = _fields(codes, 2)
    order = fields.flatten(-2) if interleaved else fields.mT.flatten(-2)
    require(scales_zeros.shape[-1] % 2 == 0, "scales_zeros.shape", list(scales_zeros.shape), "must end in pairs")
    scale, zero = scales_zeros.float().unflatten(-1, (-1, 2)).unbind(-1)
    grouped = _grouped("scales_zeros", order, scale)
    values: torch.Tensor = (grouped - zero[..., None]) * scale[..., None]
    return values.flatten(-2)


def kivi(words: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, *, bits: int, dim: int) -> torch.Tensor:
    """Read codes of KIVI, of keys or of values.

    Parameters
    ----------
    words : torch.Tensor
        int32, packed along `dim`: each holds ``32 // bits`` neighbours, from its lowest bits up.
    scale, minimum : torch.Tensor
        Any float dtype, the shape of words but for `dim`, which counts groups of neighbours; a value is
        ``code * scale + minimum``.
    bits : int
        2 or 4.
    dim : int
        Along which values are grouped: tokens for keys, channels for values.

    Returns
    -------
    torch.Tensor
        float32, the shape of words but for `dim`.

    Raises
    ------
    ValueError
        If a shape or a dtype does not fit, or bits or dim is something else.

    Notes
    -----
    ``quant/new_pack.py`` of KIVI. Keys in groups of less than 64 tokens need 4 bits here, for want of parameters.
    """
    require(bits in (2, 4), "bits", bits, "must be 2 or 4")
    require(-words.dim() <= dim < words.dim(), "dim", dim, f"must be one of the {words.dim()} of words")
    require(words.dtype == torch.int32, "words.dtype", words.dtype, "must be torch.int32")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = ((words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
    scale, minimum = (x.float().movedim(dim, -1) for x in (scale, minimum))
    require(minimum.shape == scale.shape, "minimum.shape", list(minimum.shape), "must be the shape of scale")
    grouped = _grouped("scale", codes, scale)
    return (grouped * scale[..., None] + minimum[..., None]).flatten(-2).movedim(-1, dim)


def nibble_halves(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Read 4-bit rows of LMDeploy or of SAW-INT4.

    Parameters
    ----------
    codes : torch.Tensor
        uint8 ``[..., head_dim // 2]``: byte j holds channel j in its low half, and channel j + head_dim / 2.
    scale, zero : torch.Tensor
        Any float dtype, ``[...]``: of each row; a value is ``(code - zero) * scale``.

    Returns
    -------
    torch.Tensor
        float32 ``[..., head_dim]``.

    Raises
    ------
    ValueError
        If a shape or a dtype does not fit.

    Notes
    -----
    ``fill_kv_cache.py`` of LMDeploy.
    """
    return _rows(_fields(codes, 4).mT.flatten(-2), scale.float(), zero.float())


def vllm_int4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Read rows of vLLM's ``int4_per_token_head``.

    Parameters
    ----------
    codes : torch.Tensor
        uint8 ``[..., head_dim // 2]``: byte j holds channel 2 j in its low half, and channel 2 j + 1.
    scale : torch.Tensor
        float32 ``[...]``: of each row, but for its lowest 4 bits, an integer zero; a value is
        ``(code - zero) * scale``.

    Returns
    -------
    torch.Tensor
        float32 ``[..., head_dim]``, in the rotated space that vLLM quantises in.

    Raises
    ------
    ValueError
        If a shape or a dtype does not fit.

    Notes
    -----
    ``vllm/v1/attention/ops/int4_per_token_head.py``.
    """
    require_tensor("scale", scale, shape=tuple(codes.shape[:-1]), dtypes=(torch.float32,), device=codes.device)
    words = scale.contiguous().view(torch.int32)
    return _rows(_fields(codes, 4).flatten(-2), (words & -16).view(torch.float32), (words & 15).float())


def _fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of bytes: ``[..., bytes]`` to ``[..., bytes, 8 // bits]``."""
    require(codes.dtype == torch.uint8, "codes.dtype", codes.dtype, "must be torch.uint8")
    require(codes.dim() > 0, "codes.shape", [], "must have a last dimension of bytes")
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _grouped(name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Split the last dimension of codes into as many groups as scale has."""
    fits = scale.shape[:-1] == codes.shape[:-1] and scale.shape[-1] > 0 and codes.shape[-1] % scale.shape[-1] == 0
    rule = f"must hold each group of rows of {codes.shape[-1]} values, in shape {list(codes.shape[:-1])}"
    require(fits, f"{name}.shape", list(scale.shape), rule)
    grouped: torch.Tensor = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    return grouped


def _rows(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Values ``(code - zero) * scale``, with one scale and zero a row."""
    for name, x in (("scale", scale), ("zero", zero)):
        require(x.shape == codes.shape[:-1], f"{name}.shape", list(x.shape), f"must be {list(codes.shape[:-1])}")
    return (codes.float() - zero[..., None]) * scale[..., None]
