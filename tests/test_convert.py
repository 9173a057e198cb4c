"""Caches of other projects: golden vectors by hand from their sources, and what becomes of them in pages."""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch

import foscar
from foscar import convert


def u8(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_oscar() -> None:
    """0 to 7 in one group: scale 7 / 3, zero 0, codes 0, 0, 1, 1, 2, 2, 3, 3."""
    scales_zeros = torch.tensor([7 / 3, 0.0])
    want = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]) * (7 / 3)
    assert torch.allclose(convert.oscar(u8([228, 228]), scales_zeros), want)
    assert torch.allclose(convert.oscar(u8([0b01010000, 0b11111010]), scales_zeros, interleaved=True), want)
    # Two groups, whose scales and zeros take turns: codes 3, 0, 0, 0 and 0, 0, 2, 1.
    groups = torch.tensor([[2.0, 0.5, 10.0, -1.0]]).bfloat16()
    got = convert.oscar(u8([[0b00_00_00_11, 0b00_00_00_00]]) | u8([[0b10_00_00_00, 0b01_00_00_00]]), groups)
    assert got.tolist() == [[5.0, -1.0, -1.0, -1.0, 10.0, 10.0, 30.0, 20.0]]


def test_kivi() -> None:
    """A word of 2 bits holds 16 neighbours along the packed dimension, of 4 bits 8, from the lowest bits up."""
    word = sum(code << 2 * i for i, code in enumerate([3, 0, 1, 2] + [1] * 11 + [0]))
    got = convert.kivi(
        torch.tensor([[word]], dtype=torch.int32),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[1.0, -1.0]]),
        bits=2,
        dim=1,
    )
    assert got.tolist() == [[2.5, 1.0, 1.5, 2.0] + [1.5] * 4 + [1.0] * 7 + [-1.0]]
    keys = torch.tensor([[[0x76543210], [-1]]], dtype=torch.int32).transpose(1, 2)  # [heads, tokens / 8, channels]
    scale, minimum = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[0.0, 3.0]]])
    got = convert.kivi(keys, scale.half(), minimum.half(), bits=4, dim=-2)
    assert got.shape == (1, 8, 2) and got[0, :, 0].tolist() == list(range(8)) and (got[0, :, 1] == 33).all()


def test_nibble_halves() -> None:
    got = convert.nibble_halves(u8([[0xF0, 0x21]]), torch.tensor([0.5]).half(), torch.tensor([1.0]).half())
    assert got.tolist() == [[-0.5, 0.0, 7.0, 0.5]]


def test_vllm() -> None:
    """The zero, 5, lies in the low bits of 0.5."""
    scale = (torch.tensor([0.5]).view(torch.int32) | 5).view(torch.float32)
    assert convert.vllm_int4(u8([[0xF0, 0x21]]), scale).tolist() == [[-2.5, 5.0, -2.0, -1.5]]


@pytest.mark.parametrize("bits", [2, 4])
def test_values_in_pages(bits: int) -> None:
    """Codes, offsets and scales of other projects, random but with all codes in each group, keep their values."""
    codes = torch.randint(0, 1 << bits, (100, 2, 128))
    codes[..., :2] = torch.tensor([0, (1 << bits) - 1])
    scale = torch.rand(100, 2) + 0.5
    minimum = -scale * (1 << bits) * torch.rand(100, 2)
    shifts = torch.arange(0, 32, bits)
    words = (codes.unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1)
    words = torch.where(words < 2**31, words, words - 2**32).int()
    values = convert.kivi(words, scale[..., None], minimum[..., None], bits=bits, dim=-1)
    if bits == 2:
        quarters = (codes.unflatten(-1, (4, -1)) << torch.arange(0, 8, 2)[:, None]).sum(-2).byte()
        also = convert.oscar(quarters, torch.stack([scale, -minimum / scale], -1))
    else:
        halves = (codes[..., :64] | codes[..., 64:] << 4).byte()
        also = convert.nibble_halves(halves, scale, -minimum / scale)
    assert torch.allclose(also, values, atol=1e-5)
    spec = foscar.CacheSpec.token_wise(bits, 2, 128)
    kept, _ = make_batch(spec, [100], kv=([values], [values])).dequantized()[0]
    span = scale * ((1 << bits) - 1)
    bound = torch.maximum(minimum.abs(), (minimum + span).abs()) * 2**-7 + span * 2**-8
    assert ((kept - values).abs() <= bound[..., None]).all()
    # To the bit where scales and offsets can be stored as they are: here with offsets 0 and a scale of 16 bits.
    exact = codes * 0.75
    kept, _ = make_batch(spec, [100], kv=([exact], [exact])).dequantized()[0]
    assert torch.equal(kept, exact)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (
            r"codes.dtype=torch.int32: must be torch.uint8",
            lambda: convert.oscar(torch.zeros(2, 2).int(), torch.ones(2, 2)),
        ),
        (
            r"scales_zeros.shape=\[3, 1\]: must hold each group of rows of 8",
            lambda: convert.oscar(u8([[0, 0]]), torch.ones(3, 2)),
        ),
        (r"scales_zeros.shape=\[3\]: must hold each group", lambda: convert.oscar(u8([0, 0]), torch.ones(6))),
        (
            r"scales_zeros.shape=\[1, 3\]: must end in pairs",
            lambda: convert.oscar(u8([[0, 0]]), torch.ones(1, 3)),
        ),
        (
            r"dim=5: must be one of the 1 of words",
            lambda: convert.kivi(torch.zeros(1).int(), torch.ones(1), torch.ones(1), bits=2, dim=5),
        ),
        (
            r"bits=3: must be 2 or 4",
            lambda: convert.kivi(torch.zeros(1).int(), torch.ones(1), torch.ones(1), bits=3, dim=0),
        ),
        (
            r"words.dtype=torch.int64",
            lambda: convert.kivi(torch.zeros(1).long(), torch.ones(1), torch.ones(1), bits=2, dim=0),
        ),
        (
            r"minimum.shape=\[2\]",
            lambda: convert.kivi(torch.zeros(1).int(), torch.ones(1), torch.ones(2), bits=2, dim=0),
        ),
        (r"zero.shape=\[2\]: must be \[1\]", lambda: convert.nibble_halves(u8([[0]]), torch.ones(1), torch.ones(2))),
        (r"scale.dtype=torch.float16", lambda: convert.vllm_int4(u8([[0]]), torch.ones(1).half())),
    ],
)
def test_arguments_that_do_not_fit(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
