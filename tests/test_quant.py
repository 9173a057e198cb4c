from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from helpers import quant_specs
from hypothesis import given, settings
from hypothesis import strategies as st

import foscar
from foscar.layout import HEAD_DIMS, PAGE_SIZE, QuantSpec, record_layout
from foscar.reference.quant import BF16_MAX, LEAST_SCALE, check_finite, quantize, unpack_words
from foscar.reference.records import read_codes, read_params, write_channel_params, write_tokens

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dequantized(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    codes, words = quantize(x, spec)
    assert codes.dtype == torch.uint8 and codes.max() <= spec.levels
    scale, offset = (w.double() for w in unpack_words(words, spec.axis))
    if spec.axis == "channel":
        return scale[..., None, :] * codes + offset[..., None, :]
    groups = codes.unflatten(-1, (-1, spec.group_size))
    return (scale[..., None] * groups + offset[..., None]).flatten(-2)


def resolved(bits: int, axis: str = "token", group_size: int | None = None, head_dim: int = 128, clip: float = 1.0):
    k = QuantSpec(bits, axis, group_size, clip)  # type: ignore[arg-type]
    return foscar.CacheSpec(k, k, 1, head_dim).k


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_half_a_step(head_dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, PAGE_SIZE, head_dim) * torch.logspace(-3, 3, PAGE_SIZE)[:, None]).to(dtype)
    for spec in quant_specs(head_dim):
        wide = x.double()
        if spec.axis == "channel":
            span = (wide.amax(-2, keepdim=True) - wide.amin(-2, keepdim=True)).expand_as(wide)
            low = wide.amin(-2, keepdim=True).abs().expand_as(wide)
        else:
            groups = wide.unflatten(-1, (-1, spec.group_size))
            span = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)).expand_as(groups).flatten(-2)
            low = groups.amin(-1, keepdim=True).abs().expand_as(groups).flatten(-2)
        # An offset that bfloat16 cannot hold is rounded down, and the step grows to make up for it.
        slack = 0 if dtype == torch.bfloat16 else 2**-7
        bound = (span + slack * low) / spec.levels / 2 * (1 + 2**-7) + span * 2**-8
        assert ((dequantized(x, spec) - wide).abs() <= bound).all()


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_constant_rows_are_exact(axis: str, bits: int, dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1e-3, 0.1, 1.0, 100.0, 6e4, -6e4, 1e-7, -1 / 3]
    values += [3e38, -3e38, 1e-40, BF16_MAX, -BF16_MAX] if dtype == torch.bfloat16 else []
    for value in values:
        x = torch.full((1, PAGE_SIZE, 128), value).to(dtype)
        assert torch.equal(dequantized(x, resolved(bits, axis)).to(dtype), x), value


def test_constant_float32_rows_are_within_2_to_the_minus_15() -> None:
    values = torch.randn(1000) * torch.logspace(-30, 30, 1000)
    got = dequantized(values[:, None].expand(-1, 128), resolved(2))
    assert ((got - values[:, None]).abs() <= values[:, None].abs() * 2**-15 + LEAST_SCALE).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_the_whole_range_of_bfloat16_survives(bits: int) -> None:
    x = torch.tensor([-BF16_MAX, BF16_MAX]).repeat(64)[None]
    got = dequantized(x, resolved(bits))
    assert ((got - x).abs() <= BF16_MAX * 2**-6).all()
    low = torch.full((1, 128), -3e38).index_fill(1, torch.arange(64), -2.9e38).bfloat16()
    assert torch.allclose(dequantized(low, resolved(bits)), low.double(), rtol=2**-8)


@pytest.mark.parametrize("bits", [2, 4])
def test_values_between_the_ends_of_bfloat16_survive(bits: int) -> None:
    x = torch.linspace(-BF16_MAX, BF16_MAX, 128, dtype=torch.float64)[None].float()
    step = 2 * BF16_MAX / (2**bits - 1)
    assert ((dequantized(x, resolved(bits)) - x).abs() <= step / 2 * (1 + 2**-5)).all()


def test_codes_are_those_of_the_scale_as_it_is_read() -> None:
    x = torch.randn(2000, 128)
    codes, words = quantize(x, resolved(4))
    scale, offset = unpack_words(words, "token")
    nearest = (((x.double() - offset.double()) / scale.double()).round()).clamp(0, 15)
    ties = ((x.double() - offset.double()) / scale.double() % 1 - 0.5).abs() < 1e-5
    assert torch.equal(codes[~ties].double(), nearest[~ties])


def test_a_range_below_float32s_normal_numbers_collapses() -> None:
    for span in (1e-44, 1e-39, 1e-38, 2e-38):
        x = torch.rand(4, 128) * span
        got = dequantized(x, resolved(2))
        assert torch.isfinite(got).all() and ((got - x).abs() <= span).all()


@pytest.mark.parametrize("ratio", [0, 1, 10, 100, 1000])
def test_offsets_much_larger_than_the_range(ratio: float) -> None:
    """In bfloat16 the offset is exact; in finer types the error stays within the range of a row and bfloat16's step."""
    for dtype in DTYPES:
        x = (torch.rand(64, 1, 128) * 2 - 1 + 2 * ratio).to(dtype)
        wide = x.double()
        span = wide.amax(-1, keepdim=True) - wide.amin(-1, keepdim=True)
        error = (dequantized(x, resolved(2)) - wide).abs()
        if dtype == torch.bfloat16:
            assert (error <= span / 6 * (1 + 2**-6)).all()
        else:
            assert (error <= span + wide.abs() * 2**-14).all()


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_words(axis: str) -> None:
    x = torch.randn(64, 64) * torch.logspace(-16, 20, 64)[:, None]
    _, words = quantize(x if axis == "token" else x.mT, resolved(4, axis, head_dim=64))
    scale, offset = (w.view(64, 1) for w in unpack_words(words, axis))  # type: ignore[arg-type]
    assert axis == "token" or torch.equal(scale, scale.bfloat16().float())
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    assert torch.equal(offset, offset.bfloat16().float())
    assert (offset <= low).all()
    assert (low - offset <= low.abs() * 2**-7).all()
    ideal = (high.double() - offset) / 15
    assert ((scale - ideal).abs() <= ideal * 2**-8).all()


@pytest.mark.parametrize(
    ("head_dim", "clip", "index"), [(128, 0.96, 122), (128, 0.92, 117), (64, 0.96, 61), (64, 1, 63)]
)
def test_clip_keeps_that_fraction_of_the_magnitudes(head_dim: int, clip: float, index: int) -> None:
    x = torch.randn(20, head_dim)
    limit = x.abs().sort(-1).values[:, index : index + 1]
    got, want = (
        quantize(x, resolved(4, head_dim=head_dim, clip=clip)),
        quantize(x.clamp(-limit, limit), resolved(4, head_dim=head_dim)),
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    blocks = torch.randn(3, PAGE_SIZE, head_dim)
    limit = blocks.abs().sort(-2).values[:, int(clip * 64) if clip < 1 else 63][:, None]
    got, want = (
        quantize(blocks, resolved(4, "channel", head_dim=head_dim, clip=clip)),
        quantize(blocks.clamp(-limit, limit), resolved(4, "channel", head_dim=head_dim)),
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_outliers_of_one_channel_spoil_token_rows_but_not_channel_blocks() -> None:
    x = torch.randn(1, PAGE_SIZE, 128)
    x[..., 7] *= 100
    rest = [i for i in range(128) if i != 7]
    errors = {axis: (dequantized(x, resolved(4, axis)) - x)[..., rest].abs().mean() for axis in ("token", "channel")}
    assert errors["token"] > 5 * errors["channel"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_cannot_be_stored_is_named_with_its_position(value: float) -> None:
    x = torch.zeros(5, 2, 64)
    x[3, 1, 17] = value
    with pytest.raises(ValueError, match=r"v\[3, 1, 17\]=.*: must be finite and at most bfloat16's maximum"):
        check_finite("v", x)
    check_finite("v", x[:3])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pack_unpack_round_trip(data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from(HEAD_DIMS))
    k, v = (data.draw(st.sampled_from(quant_specs(head_dim))) for _ in range(2))
    heads, num_pages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    spec = foscar.CacheSpec(k, v, heads, head_dim)
    layout = record_layout(spec)
    seeds = st.integers(0, 2**32 - 1)
    pages = torch.from_numpy(
        np.random.default_rng(data.draw(seeds)).integers(0, 256, (num_pages, heads, spec.record_bytes), np.uint8)
    )
    places = data.draw(
        hnp.arrays(np.int64, st.integers(0, 64), elements=st.integers(0, num_pages * PAGE_SIZE - 1), unique=True)
    )
    page, token = torch.from_numpy(places // PAGE_SIZE), torch.from_numpy(places % PAGE_SIZE)
    rng = np.random.default_rng(data.draw(seeds))
    for operand in (layout.k, layout.v):
        codes_before = read_codes(pages, operand)
        params_before = read_params(pages, operand)
        shape = (len(places), heads, head_dim)
        codes = torch.from_numpy(rng.integers(0, operand.quant.levels + 1, shape, np.uint8))
        words = None
        if operand.quant.axis == "token":
            groups = head_dim // (operand.quant.group_size or 1)
            words = torch.from_numpy(rng.integers(-(2**31), 2**31, (len(places), heads, groups), np.int64)).int()
        write_tokens(pages, page, token, codes, words, operand)
        # What was written reads back, and no other token changed.
        want = codes_before.clone()
        want[page, :, token] = codes
        assert torch.equal(read_codes(pages, operand), want)
        scale, offset = read_params(pages, operand)
        want_scale, want_offset = (p.clone() for p in params_before)
        if words is not None:
            want_scale[page, :, token], want_offset[page, :, token] = unpack_words(words, "token")
        assert torch.equal(scale.view(torch.int32), want_scale.view(torch.int32))
        assert torch.equal(offset.view(torch.int32), want_offset.view(torch.int32))


def test_channel_params_round_trip() -> None:
    spec = foscar.CacheSpec(QuantSpec(2, "channel"), QuantSpec(4, "channel"), 2, 96)
    pages = torch.randint(0, 256, (4, 2, spec.record_bytes), dtype=torch.uint8)
    layout = record_layout(spec)
    for operand in (layout.k, layout.v):
        words = torch.randint(-(2**31), 2**31, (2, 2, 96)).int()
        before = pages.clone()
        write_channel_params(pages, torch.tensor([3, 1]), words, operand)
        scale, offset = read_params(pages, operand)
        assert torch.equal(scale[[3, 1]].view(torch.int32), words & -0x10000)
        assert torch.equal(offset[[3, 1]].view(torch.int32), words << 16)
        assert torch.equal(pages[[0, 2]], before[[0, 2]])
        assert torch.equal(read_codes(pages, operand), read_codes(before, operand))
