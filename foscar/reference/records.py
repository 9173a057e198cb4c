"""Reading and writing records: bytes to integer codes and parameters, and back."""

from __future__ import annotations

import torch

from foscar.layout import PARAM_BYTES, OperandLayout
from foscar.reference.quant import unpack_words


def read_codes(records: torch.Tensor, operand: OperandLayout) -> torch.Tensor:
    """Unpack the codes of whole records: uint8 ``[..., record_bytes]`` to uint8 ``[..., 64, head_dim]``."""
    packed = records[..., operand.code_byte]
    codes = (packed.unsqueeze(-1) >> _shifts(operand)) & operand.quant.levels
    return codes.flatten(-2)[..., operand.code_channel.flatten().argsort()]


def read_params(records: torch.Tensor, operand: OperandLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Read scales and offsets, float32 each: token-wise ``[..., 64, groups]``, channel-wise ``[..., head_dim]``."""
    words = records[..., _word_bytes(operand)].view(torch.int32).squeeze(-1)
    return unpack_words(words, operand.quant.axis)


def write_tokens(
    pages: torch.Tensor,
    page: torch.Tensor,
    token: torch.Tensor,
    codes: torch.Tensor,
    words: torch.Tensor | None,
    operand: OperandLayout,
) -> None:
    """Write tokens into pages, touching no other token's bytes.

    Parameters
    ----------
    pages : torch.Tensor
        uint8 ``[num_pages, num_kv_heads, record_bytes]``, changed in place.
    page, token : torch.Tensor
        int64 ``[n]``: the page of each token and its place in it.
    codes : torch.Tensor
        uint8 ``[n, num_kv_heads, head_dim]``.
    words : torch.Tensor, optional
        int32 ``[n, num_kv_heads, groups]``, for a token-wise operand.
    operand : OperandLayout
        Where the operand lies.
    """
    head = torch.arange(pages.shape[1], device=pages.device)[:, None]
    packed = (codes[..., operand.code_channel] << _shifts(operand)).sum(-1, dtype=torch.uint8)
    pages[page[:, None, None], head, operand.code_byte[token][:, None]] = packed
    if words is not None:
        place = _word_bytes(operand)[token][:, None]
        pages[page[:, None, None, None], head[..., None], place] = words.unsqueeze(-1).view(torch.uint8)


def write_channel_params(pages: torch.Tensor, page: torch.Tensor, words: torch.Tensor, operand: OperandLayout) -> None:
    """Write the parameters of channel-wise blocks, int32 ``[n, num_kv_heads, head_dim]``, into pages ``[n]``."""
    head = torch.arange(pages.shape[1], device=pages.device)[:, None, None]
    pages[page[:, None, None, None], head, _word_bytes(operand)] = words.unsqueeze(-1).view(torch.uint8)


def _shifts(operand: OperandLayout) -> torch.Tensor:
    return torch.arange(0, 8, operand.quant.bits, dtype=torch.uint8, device=operand.code_byte.device)


def _word_bytes(operand: OperandLayout) -> torch.Tensor:
    return operand.param_byte.unsqueeze(-1) + torch.arange(PARAM_BYTES, device=operand.param_byte.device)
