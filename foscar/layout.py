"""The page record: what a cache stores, and where every byte and bit of it lies.

This module is the only place that knows the format (docs/format.md is its prose). A page is 64 tokens; what one KV
head needs of one page is one contiguous *record* of four regions, without padding between them::

    K codes | K parameters | V codes | V parameters

The format depends neither on a GPU's generation nor on the number of query heads.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal

import torch

from foscar._checks import require, require_int

FORMAT_VERSION = 1
PAGE_SIZE = 64
HEAD_DIMS = (64, 96, 128, 256)
PARAM_BYTES = 4

Axis = Literal["token", "channel"]


@dataclass(frozen=True)
class QuantSpec:
    """How one operand, K or V, is quantised.

    Parameters
    ----------
    bits : int
        Bits of a code: 2 or 4.
    axis : {"token", "channel"}
        What shares a scale and an offset: ``"token"``, one token's channels (or groups of them); ``"channel"``, one
        channel's 64 tokens of a page.
    group_size : int, optional
        Token-wise: channels that share a scale and an offset; head_dim (the default), 64 or 32, if it divides head_dim.
        Channel-wise: tokens that do, always 64.
    clip : float
        Fraction, in (0, 1], of a row's magnitudes that is left as it is: before it is quantised, a row of n values (one
        token's channels, or one channel's 64 tokens) is clamped to plus or minus the magnitude that ``int(clip * n)``
        others are below. 1 clips nothing. It changes the values stored, not the format.
    hadamard : bool
        Whether new tokens are rotated by `foscar.rotation.hadamard` first, by a fast transform. Queries and outputs are
        rotated to match by whoever attends. It changes the values stored, not the format.

    Raises
    ------
    ValueError
        If a value is not one of those above.
    """

    bits: int
    axis: Axis = "token"
    group_size: int | None = None
    clip: float = 1.0
    hadamard: bool = False

    def __post_init__(self) -> None:
        require(isinstance(self.bits, int) and self.bits in (2, 4), "bits", self.bits, "must be 2 or 4")
        if self.group_size is not None:
            require_int("group_size", self.group_size, 1)
        require(self.axis in ("token", "channel"), "axis", self.axis, "must be 'token' or 'channel'")
        require(0 < self.clip <= 1, "clip", self.clip, "must be in (0, 1]")
        object.__setattr__(self, "clip", float(self.clip))
        require(isinstance(self.hadamard, bool), "hadamard", self.hadamard, "must be True or False")

    @property
    def levels(self) -> int:
        """Largest code: 3 or 15."""
        return (1 << self.bits) - 1

    def clip_rank(self, size: int) -> int:
        """Which of the `size` magnitudes of a row, sorted, is the limit of all."""
        return min(int(self.clip * size), size - 1)

    def _resolve(self, name: str, head_dim: int) -> QuantSpec:
        """Fill in the default group size and check it against head_dim."""
        if self.axis == "channel":
            allowed, rule = [PAGE_SIZE], "(tokens) for axis 'channel'"
        else:
            allowed = sorted({size for size in (head_dim, 64, 32) if head_dim % size == 0}, reverse=True)
            rule = f"(channels) for axis 'token' and head_dim {head_dim}"
        size = allowed[0] if self.group_size is None else self.group_size
        require(size in allowed, f"{name}.group_size", size, f"must be one of {allowed} {rule}")
        return replace(self, group_size=size)

    def __str__(self) -> str:
        clip = "" if self.clip == 1 else f"c{self.clip!r}"
        return f"{self.bits}{self.axis[0]}{self.group_size}{clip}{'h' if self.hadamard else ''}"


@dataclass(frozen=True)
class CacheSpec:
    """What a cache stores: two quantisers, a shape, and how many tokens stay in the model's precision.

    Parameters
    ----------
    k, v : QuantSpec
        Quantisers of keys and values, independent of each other.
    num_kv_heads : int
        KV heads in each page.
    head_dim : int
        Channels of a head, the same for K and V: 64, 96, 128 or 256.
    sink_tokens : int
        First tokens of each sequence that are never quantised.
    recent_tokens : int
        Last tokens of each sequence that are not quantised yet. With a channel-wise operand, blocks of 64 tokens leave
        this window together, so up to 63 tokens more wait in it.

    Raises
    ------
    ValueError
        If a value is out of range; the message names it.
    """

    k: QuantSpec
    v: QuantSpec
    num_kv_heads: int
    head_dim: int
    sink_tokens: int = 0
    recent_tokens: int = 0

    def __post_init__(self) -> None:
        known = isinstance(self.head_dim, int) and self.head_dim in HEAD_DIMS
        require(known, "head_dim", self.head_dim, f"must be one of {list(HEAD_DIMS)}")
        require_int("num_kv_heads", self.num_kv_heads, 1)
        require_int("sink_tokens", self.sink_tokens, 0)
        require_int("recent_tokens", self.recent_tokens, 0)
        for name, quant in (("k", self.k), ("v", self.v)):
            require(isinstance(quant, QuantSpec), name, quant, "must be a foscar.QuantSpec")
        object.__setattr__(self, "k", self.k._resolve("k", self.head_dim))
        object.__setattr__(self, "v", self.v._resolve("v", self.head_dim))

    @classmethod
    def token_wise(
        cls,
        bits: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_bits: int | None = None,
        group_size: int | None = None,
        sink_tokens: int = 0,
        recent_tokens: int = 0,
    ) -> CacheSpec:
        """K and V token-wise, `bits` each (`v_bits` for V if it differs)."""
        k = QuantSpec(bits, "token", group_size)
        v = QuantSpec(bits if v_bits is None else v_bits, "token", group_size)
        return cls(k, v, num_kv_heads, head_dim, sink_tokens, recent_tokens)

    @classmethod
    def kivi(
        cls,
        bits: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_bits: int | None = None,
        group_size: int | None = None,
        sink_tokens: int = 0,
        recent_tokens: int = 0,
    ) -> CacheSpec:
        """K channel-wise in 64-token blocks, V token-wise in groups of `group_size` channels.

        The scheme of KIVI (Liu et al., 2024, arXiv:2402.02750), with its block of tokens fixed to a page. KIVI itself
        keeps 128 recent tokens and has groups of 32; both are for the caller to choose.
        """
        k = QuantSpec(bits, "channel")
        v = QuantSpec(bits if v_bits is None else v_bits, "token", group_size)
        return cls(k, v, num_kv_heads, head_dim, sink_tokens, recent_tokens)

    @property
    def page_size(self) -> int:
        """Tokens of a page: 64."""
        return PAGE_SIZE

    @property
    def record_bytes(self) -> int:
        """Bytes of one KV head's part of one page, parameters included; a multiple of 128."""
        return record_layout(self).nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits that one quantised element of K or V costs, parameters included."""
        return self.record_bytes * 8 / (2 * PAGE_SIZE * self.head_dim)

    @property
    def block_wise(self) -> bool:
        """Whether tokens are quantised in blocks of a page: K or V is channel-wise."""
        return "channel" in (self.k.axis, self.v.axis)

    @property
    def ring_tokens(self) -> int:
        """Slots of a sequence's ring of recent tokens: the recent window, and the block that is being filled."""
        return self.recent_tokens + (PAGE_SIZE if self.block_wise else 0)

    @property
    def exact_tokens(self) -> int:
        """Tokens that each sequence may keep in the model's precision: its sinks, then its ring."""
        return self.sink_tokens + self.ring_tokens

    def ring_row(self, position: int) -> int:
        """Row, among a sequence's exact tokens, of the one at `position` while it is in the ring."""
        return self.sink_tokens + position % self.ring_tokens

    def quantized_len(self, seq_len: int, before: int = 0) -> int:
        """Where the ring begins once a sequence has grown to `seq_len` tokens.

        Tokens before it have left the recent window. It never moves back, except when a sequence is truncated:
        `before` is where it was, at most the length that the sequence grew from.
        """
        left = max(seq_len - self.recent_tokens, before)
        return left // PAGE_SIZE * PAGE_SIZE if self.block_wise else left

    def sequence_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes that one sequence of `seq_len` tokens takes: whole pages, and its exact tokens in `dtype`."""
        pages = len(pages_of(range(self.sink_tokens, self.quantized_len(seq_len))))
        exact = 2 * self.exact_tokens * self.head_dim * dtype.itemsize
        return self.num_kv_heads * (pages * self.record_bytes + exact)

    def __str__(self) -> str:
        shape = f"h{self.num_kv_heads}-d{self.head_dim}-s{self.sink_tokens}-r{self.recent_tokens}"
        return f"k{self.k}-v{self.v}-{shape}"

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> CacheSpec:
        """Read back what ``str(spec)`` wrote, ``k2c64-v2t128-h8-d128-s64-r128`` for instance."""
        quant = r"([24])([tc])(\d+)(?:c([\d.e-]+))?(h?)"
        match = re.fullmatch(rf"k{quant}-v{quant}-h(\d+)-d(\d+)-s(\d+)-r(\d+)", text)
        require(match is not None, "text", text, "must be what str(spec) gives")
        assert match is not None
        fields = match.groups()

        def quantizer(bits: str, axis: str, group_size: str, clip: str | None, hadamard: str) -> QuantSpec:
            name: Axis = "token" if axis == "t" else "channel"
            return QuantSpec(int(bits), name, int(group_size), float(clip or 1), bool(hadamard))

        return cls(quantizer(*fields[:5]), quantizer(*fields[5:10]), *map(int, fields[10:]))


def pages_of(positions: range) -> range:
    """Columns of a block table whose pages hold these tokens."""
    return range(positions.start // PAGE_SIZE, -(-positions.stop // PAGE_SIZE)) if positions else range(0)


@dataclass(frozen=True, eq=False)
class OperandLayout:
    """Where K or V lies in a record. Offsets count bytes from the start of the record.

    A byte holds ``8 / bits`` codes, the first in its lowest bits, and always codes of a single token: a token is
    written without reading its neighbours.

    Attributes
    ----------
    quant : QuantSpec
        How the operand is quantised.
    code_offset, param_offset, end : int
        First byte of the codes, first byte of the parameters, first byte after them.
    code_byte : torch.Tensor
        int64 ``[64, code_bytes_per_token]``: the bytes that hold a token's codes.
    code_channel : torch.Tensor
        int64 ``[code_bytes_per_token, 8 / bits]``: the channels in each of those bytes, lowest bits first.
    param_byte : torch.Tensor
        int64: first of the four bytes of a scale-and-offset word. Token-wise ``[64, groups]``, channel-wise
        ``[head_dim]``.
    """

    quant: QuantSpec
    code_offset: int
    param_offset: int
    end: int
    code_byte: torch.Tensor
    code_channel: torch.Tensor
    param_byte: torch.Tensor

    def to(self, device: torch.device | str) -> OperandLayout:
        """Copy the tables to a device."""
        tables = {name: getattr(self, name).to(device) for name in ("code_byte", "code_channel", "param_byte")}
        return replace(self, **tables)


@dataclass(frozen=True, eq=False)
class RecordLayout:
    """A record: its two operands and its size in bytes."""

    k: OperandLayout
    v: OperandLayout
    nbytes: int


def _k_codes(bits: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K codes: one row of bytes a token, its channels in runs of 8.

    Lane (g, c) of a warp (lane = 4 g + c) takes channels 32 r + 8 c to 32 r + 8 c + 7 of token g's row as run r: the
    four lanes' parts of a run are 32 neighbouring channels, so that a matrix instruction need not mix groups. With 4
    bits a run is a word; with 2 bits it is bytes 0 and 2, or 1 and 3, of a word that it shares with the next run. A
    lane's words lie side by side; the half words that are left of an odd number of 2-bit runs follow, those of two
    lanes to a word.
    """
    row, fields, runs = head_dim * bits // 8, 8 // bits, head_dim // 32
    run, lane, place = (x.flatten() for x in torch.meshgrid(*map(torch.arange, (runs, 4, 8)), indexing="ij"))
    if bits == 4:
        byte = 4 * (runs * lane + run) + place // 2
    else:
        alone = (runs % 2 == 1) & (run == runs - 1)
        word = torch.where(alone, runs // 2 * 4 + lane // 2, runs // 2 * lane + run // 2)
        byte = 4 * word + torch.where(alone, lane, run) % 2 + place // 4 * 2
    channel = torch.empty(row * fields, dtype=torch.int64)
    channel[byte * fields + place % fields] = torch.arange(head_dim)
    return torch.arange(PAGE_SIZE)[:, None] * row + torch.arange(row), channel.view(row, fields)


def _v_codes(bits: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """V codes: 32-bit words in the order in which a warp takes them as fragments of V transposed.

    The four bytes of a word of lane 4 g + c are tokens 2c, 2c + 8, 2c + 1 and 2c + 9 of a block of 16. The fields of a
    byte are channels 8 apart: field f of word w is channel 8 (fields w + f) + g. A lane's words, numbered through the
    four blocks, come in chunks of 16 bytes; the chunks of all lanes lie side by side, so that a warp reads 512
    contiguous bytes.
    """
    fields = 8 // bits
    words = head_dim // (8 * fields)
    token = torch.arange(PAGE_SIZE)[:, None, None]
    w = torch.arange(words)[:, None]
    g = torch.arange(8)
    lane = 4 * g + token % 8 // 2
    number = token // 16 * words + w
    byte = token % 2 * 2 + token % 16 // 8
    code_byte = number // 4 * 512 + lane * 16 + number % 4 * 4 + byte
    channel = 8 * (fields * w[:, :, None] + torch.arange(fields)) + g[:, None]
    return code_byte.flatten(1), channel.flatten(0, 1)


def _token_params(groups: int) -> torch.Tensor:
    """Token-wise words: for each group, 64 words as an 8 by 8 transpose, so that tokens g, g + 8, … adjoin."""
    token = torch.arange(PAGE_SIZE)[:, None]
    return torch.arange(groups) * PAGE_SIZE + token % 8 * 8 + token // 8


def _v_channel_params(head_dim: int) -> torch.Tensor:
    """Channel-wise words of V: channels g, g + 8, … adjoin."""
    channel = torch.arange(head_dim)
    return channel % 8 * (head_dim // 8) + channel // 8


def _operand(name: Literal["k", "v"], quant: QuantSpec, head_dim: int, start: int) -> OperandLayout:
    code_byte, code_channel = (_k_codes if name == "k" else _v_codes)(quant.bits, head_dim)
    if quant.axis == "token":
        assert quant.group_size is not None
        words = _token_params(head_dim // quant.group_size)
    else:
        words = torch.arange(head_dim) if name == "k" else _v_channel_params(head_dim)
    params = start + code_byte.numel()
    end = params + words.numel() * PARAM_BYTES
    return OperandLayout(quant, start, params, end, start + code_byte, code_channel, params + words * PARAM_BYTES)


@functools.cache
def record_layout(spec: CacheSpec, device: torch.device | str = "cpu") -> RecordLayout:
    """Return the layout of a record of `spec`, its tables on `device`."""
    with torch.device("cpu"):  # whatever the caller's default device is
        k = _operand("k", spec.k, spec.head_dim, 0)
        v = _operand("v", spec.v, spec.head_dim, k.end)
    return RecordLayout(k.to(device), v.to(device), v.end)
