from __future__ import annotations

import hashlib

import pytest
import torch
from helpers import all_specs, make_batch

import foscar
from foscar.layout import FORMAT_VERSION, HEAD_DIMS, PAGE_SIZE, record_layout


@pytest.mark.parametrize("spec", all_specs(1), ids=str)
def test_every_byte_of_a_record_has_one_meaning(spec: foscar.CacheSpec) -> None:
    layout = record_layout(spec)
    taken: list[int] = []
    for operand, start in ((layout.k, 0), (layout.v, layout.k.end)):
        assert operand.code_offset == start
        assert sorted(operand.code_byte.flatten().tolist()) == list(range(start, operand.param_offset))
        assert sorted(operand.code_channel.flatten().tolist()) == list(range(spec.head_dim))
        assert sorted(operand.param_byte.flatten().tolist()) == list(range(operand.param_offset, operand.end, 4))
        assert operand.code_offset % 16 == operand.param_offset % 16 == 0
        taken += operand.code_byte.flatten().tolist()
    assert len(taken) == len(set(taken))
    assert layout.nbytes == spec.record_bytes == layout.v.end
    assert spec.record_bytes % 128 == 0
    assert spec.bits_per_element == pytest.approx(spec.record_bytes * 8 / (2 * 64 * spec.head_dim))


@pytest.mark.parametrize(
    ("spec", "nbytes", "bits"),
    [
        (foscar.CacheSpec.token_wise(2, 8, 128), 4608, 2.25),
        (foscar.CacheSpec.token_wise(4, 8, 128), 8704, 4.25),
        (foscar.CacheSpec.token_wise(4, 8, 128, v_bits=2), 6656, 3.25),
        (foscar.CacheSpec.kivi(2, 8, 128), 4864, 2.375),
        (foscar.CacheSpec.kivi(4, 8, 128), 8960, 4.375),
        (foscar.CacheSpec.token_wise(2, 8, 128, group_size=32), 6144, 3.0),
        (foscar.CacheSpec.token_wise(2, 3, 64), 2560, 2.5),
    ],
    ids=str,
)
def test_sizes(spec: foscar.CacheSpec, nbytes: int, bits: float) -> None:
    assert (spec.record_bytes, spec.bits_per_element) == (nbytes, bits)


def test_the_format_does_not_change_unnoticed() -> None:
    """If this fails, the bytes of existing caches have a new meaning: raise FORMAT_VERSION, then change the hash."""
    digest = hashlib.sha256()
    for spec in all_specs(1):
        layout = record_layout(spec)
        for operand in (layout.k, layout.v):
            for table in (operand.code_byte, operand.code_channel, operand.param_byte):
                digest.update(table.to(torch.int32).contiguous().numpy().tobytes())
    assert (FORMAT_VERSION, digest.hexdigest()[:16]) == (1, "4d1f7adc9ce7b1ab")


def test_the_bytes_of_a_record_do_not_change_unnoticed() -> None:
    """The same for what an append writes, parameters included; values are exact in every float type."""
    digest = hashlib.sha256()
    for spec in all_specs(1):
        x = (torch.arange(64 * spec.head_dim).view(64, 1, -1) * 37 % 251 - 100) / 16
        batch = make_batch(spec, [64], kv=([x], [x.flip(0)]))
        digest.update(batch.cache.pages[batch.block_table[0, 0]].numpy().tobytes())
    assert (FORMAT_VERSION, digest.hexdigest()[:16]) == (1, "7804341be4d6350f")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [2, 4])
def test_v_words_are_fragments_of_v_transposed(bits: int, head_dim: int) -> None:
    """Lane 4 g + c takes channels g mod 8 of tokens 2c, 2c + 8, 2c + 1, 2c + 9 in the bytes of each 32-bit word."""
    v = record_layout(foscar.CacheSpec.token_wise(bits, 1, head_dim)).v
    holder: dict[int, tuple[int, list[int]]] = {}
    for token in range(PAGE_SIZE):
        for byte, channels in zip(v.code_byte[token].tolist(), v.code_channel.tolist(), strict=True):
            holder[byte - v.code_offset] = (token, channels)
    for word in range(len(holder) // 4):
        g, c = divmod(word // 4 % 32, 4)
        tokens = [holder[word * 4 + i][0] for i in range(4)]
        block = tokens[0] // 16 * 16
        assert tokens == [block + 2 * c + t for t in (0, 8, 1, 9)]
        channels = [holder[word * 4 + i][1] for i in range(4)]
        assert all(row == channels[0] for row in channels)
        assert [channel % 8 for channel in channels[0]] == [g] * (8 // bits)
        assert channels[0] == list(range(channels[0][0], channels[0][0] + 8 * (8 // bits), 8))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [2, 4])
def test_k_rows_hold_runs_of_8_channels(bits: int, head_dim: int) -> None:
    """Run r of lane c is channels 32 r + 8 c on: with 4 bits a word in order, with 2 bits two bytes, each in order."""
    k = record_layout(foscar.CacheSpec.token_wise(bits, 1, head_dim)).k
    runs, row = head_dim // 32, head_dim * bits // 8
    assert k.code_byte.flatten().tolist() == list(range(PAGE_SIZE * row))
    for c in range(4):
        for r in range(runs):
            first = 32 * r + 8 * c
            channels = list(range(first, first + 8))
            if bits == 4:
                word = runs * c + r
                assert k.code_channel[4 * word : 4 * word + 4].flatten().tolist() == channels
            else:
                word, half = (4 + c // 2, c % 2) if (head_dim, r) == (96, 2) else (runs // 2 * c + r // 2, r % 2)
                assert k.code_channel[[4 * word + half, 4 * word + half + 2]].flatten().tolist() == channels


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_channel_wise_parameters_of_a_lane_adjoin(head_dim: int) -> None:
    spec = foscar.QuantSpec(2, "channel")
    layout = record_layout(foscar.CacheSpec(spec, spec, 1, head_dim))
    assert ((layout.k.param_byte - layout.k.param_offset) // 4).tolist() == list(range(head_dim))
    words = (layout.v.param_byte - layout.v.param_offset) // 4
    for g in range(8):
        assert words[g::8].tolist() == list(range(g * head_dim // 8, (g + 1) * head_dim // 8))


def test_spec_text_round_trip() -> None:
    clipped = foscar.CacheSpec(
        foscar.QuantSpec(2, clip=0.96), foscar.QuantSpec(4, "channel", clip=1 / 3), 5, 96, 4, 100
    )
    for spec in [*all_specs(3), *all_specs(3, sink_tokens=4, recent_tokens=128), clipped]:
        assert foscar.CacheSpec.parse(str(spec)) == spec
    assert str(foscar.CacheSpec.kivi(2, 8, 128, sink_tokens=64)) == "k2c64-v2t128-h8-d128-s64-r0"
    with pytest.raises(ValueError, match=r"text='k3t64'"):
        foscar.CacheSpec.parse("k3t64")


def test_presets_and_defaults() -> None:
    spec = foscar.CacheSpec.kivi(4, 2, 256, v_bits=2, group_size=64, sink_tokens=3, recent_tokens=5)
    assert spec.k == foscar.QuantSpec(4, "channel", 64)
    assert spec.v == foscar.QuantSpec(2, "token", 64)
    assert (spec.exact_tokens, spec.ring_tokens, spec.page_size) == (3 + 5 + 64, 5 + 64, 64)
    plain = foscar.CacheSpec(foscar.QuantSpec(2), foscar.QuantSpec(2, group_size=128), 8, 128)
    assert plain == foscar.CacheSpec.token_wise(2, 8, 128)
    assert plain.exact_tokens == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: foscar.QuantSpec(3), r"bits=3: must be 2 or 4"),
        (lambda: foscar.QuantSpec(2.0), r"bits=2.0: must be 2 or 4"),
        (lambda: foscar.QuantSpec(2, group_size=32.0), r"group_size=32.0: must be an int"),
        (lambda: foscar.QuantSpec(2, "row"), r"axis='row': must be 'token' or 'channel'"),
        (lambda: foscar.QuantSpec(2, clip=0.0), r"clip=0.0: must be in \(0, 1\]"),
        (lambda: foscar.QuantSpec(2, clip=float("nan")), r"clip=nan"),
        (lambda: foscar.CacheSpec.token_wise(2, 8, 80), r"head_dim=80: must be one of \[64, 96, 128, 256\]"),
        (lambda: foscar.CacheSpec.token_wise(2, 0, 64), r"num_kv_heads=0"),
        (lambda: foscar.CacheSpec.token_wise(2, 2.0, 64), r"num_kv_heads=2.0: must be an int"),
        (lambda: foscar.CacheSpec(4, foscar.QuantSpec(2), 1, 64), r"k=4: must be a foscar.QuantSpec"),
        (lambda: foscar.CacheSpec.token_wise(2, 1, 96, group_size=64), r"k.group_size=64: must be one of \[96, 32\]"),
        (lambda: foscar.CacheSpec.kivi(2, 1, 128, group_size=48), r"v.group_size=48: must be one of \[128, 64, 32\]"),
        (
            lambda: foscar.CacheSpec(foscar.QuantSpec(2, "channel", 32), foscar.QuantSpec(2), 1, 64),
            r"k.group_size=32: must be one of \[64\] \(tokens\)",
        ),
        (lambda: foscar.CacheSpec.token_wise(2, 1, 64, sink_tokens=-1), r"sink_tokens=-1"),
        (lambda: foscar.CacheSpec.token_wise(2, 1, 64, recent_tokens=-1), r"recent_tokens=-1"),
    ],
)
def test_bad_specs(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
