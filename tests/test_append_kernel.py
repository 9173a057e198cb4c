"""The append kernel, emulated on a CPU and on a GPU: what it leaves is what the reference leaves, bit by bit."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import emulator
import pytest
import torch
from helpers import i32, poison, quant_specs, snapshot

import foscar
from foscar.cuda import append as append_kernel
from foscar.cuda.config import AppendConfig
from foscar.layout import HEAD_DIMS, record_layout
from foscar.reference import cache as reference
from foscar.reference.records import read_codes, read_params

_by_warps = itertools.cycle((True, False))
WINDOWS: list[dict[str, int]] = [{}, {"sink_tokens": 3, "recent_tokens": 20}]
T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi


def run(
    cache: foscar.PagedKVCache, *tensors: torch.Tensor, angles: torch.Tensor | None = None, is_neox: bool = True
) -> None:
    """Call the kernel, by teams of either size in turn; k, v and tables are the CPU's."""
    spec, own = cache.spec, (cache.pages, cache.exact, cache.lengths)
    by_warps = next(_by_warps) and not spec.block_wise
    rotations = (cache.k_rotation, cache.v_rotation)
    if cache.device.type == "cpu":
        emulator.append(by_warps, spec, *own, *tensors, angles, is_neox, *rotations)
    else:
        angles = None if angles is None else angles.to(cache.device)
        here = (tensor.to(cache.device) for tensor in tensors)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(append_kernel, "best_by_warps", lambda *_: by_warps)
            torch.ops.foscar.append(*own, *here, angles, is_neox, *rotations, str(spec))


class Pair:
    """A cache that the reference appends to, and one that the kernel does; and how long their sequences are."""

    def __init__(
        self,
        spec: foscar.CacheSpec,
        batch: int,
        columns: int,
        dtype: torch.dtype,
        machine: torch.device,
        rotations: Sequence[torch.Tensor | None] = (None, None),
    ) -> None:
        self.spec, self.dtype, self.rotations = spec, dtype, rotations
        num_pages = batch * columns + 2
        devices = torch.device("cpu"), machine
        self.caches = []
        for device in devices:
            there = (None if matrix is None else matrix.to(device) for matrix in rotations)
            self.caches.append(foscar.PagedKVCache(spec, num_pages, device, dtype, batch + 2, *there))
        for cache in self.caches:
            poison(cache)
        self.table = torch.randperm(num_pages, dtype=torch.int32)[: batch * columns].view(batch, columns)
        self.seq_ids = torch.randperm(batch + 2, dtype=torch.int32)[:batch]
        self.seq_lens = [0] * batch

    def append(
        self,
        counts: list[int],
        kv: torch.Tensor | None = None,
        angles: torch.Tensor | None = None,
        is_neox: bool = True,
    ) -> None:
        spec = self.spec
        if kv is None:
            kv = torch.randn(2, sum(counts), spec.num_kv_heads, spec.head_dim).to(self.dtype)
        ends = i32([0, *counts]).cumsum(0, dtype=torch.int32)
        rest = (*kv, self.table, i32(self.seq_lens), ends, self.seq_ids)
        want, got = self.caches
        rotations = want.k_rotation, want.v_rotation
        torch.ops.foscar.append(want.pages, want.exact, want.lengths, *rest, angles, is_neox, *rotations, str(spec))
        run(got, *rest, angles=angles, is_neox=is_neox)
        if rotations == (None, None):
            assert snapshot(got) == snapshot(want)
        else:
            self.compare()
        self.seq_lens = [length + count for length, count in zip(self.seq_lens, counts, strict=True)]

    def compare(self) -> None:
        """Sums of another order are rounded otherwise now and then: to the next value, and so to the next code."""
        want, got = self.caches
        assert torch.equal(got.lengths.cpu(), want.lengths)
        assert torch.allclose(got.exact.cpu().float(), want.exact.float(), 2**-7, 1e-3, equal_nan=True)
        pages = got.pages.cpu()
        assert (pages == want.pages).float().mean() >= 0.99
        layout = record_layout(self.spec)
        for operand in (layout.k, layout.v):
            (scale, offset), wanted = (read_params(p, operand) for p in (pages, want.pages))
            assert torch.allclose(scale, wanted[0], 0.02, equal_nan=True)
            assert torch.allclose(offset, wanted[1], 0.02, 1e-3, equal_nan=True)
            codes, wanted_codes = (read_codes(p, operand).int() for p in (pages, want.pages))
            assert (codes - wanted_codes).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_all_formats(head_dim: int, dtype: torch.dtype, machine: torch.device) -> None:
    quants = quant_specs(head_dim)
    for k, v in zip(quants, quants[1:] + quants[:1], strict=True):
        pair = Pair(foscar.CacheSpec(k, v, 2, head_dim), 2, 3, dtype, machine)
        pair.append([70, 3])
        pair.append([1, 66])


@pytest.mark.parametrize("windows", [(0, 0), (4, 0), (0, 1), (0, 30), (64, 128), (100, 7), (200, 64)], ids=str)
@pytest.mark.parametrize(
    "spec",
    [T(2, 1, 64), K(4, 2, 64), foscar.CacheSpec(foscar.QuantSpec(2), foscar.QuantSpec(4, "channel"), 1, 64)],
    ids=str,
)
def test_windows(spec: foscar.CacheSpec, windows: tuple[int, int], machine: torch.device) -> None:
    """Appends that cross each border: one token, several, more than a window has."""
    pair = Pair(replace(spec, sink_tokens=windows[0], recent_tokens=windows[1]), 3, 20, torch.bfloat16, machine)
    for counts in ([0, 1, 63], [5, 1, 1], [1, 1, 0], [300, 64, 65], [1, 1, 1], [1, 200, 1], [63, 1, 129], [0, 0, 2]):
        pair.append(counts)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(seed: int, machine: torch.device) -> None:
    """Also truncated ones, and begun anew, with many sequences."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    quants = quant_specs(64)
    windows = {"sink_tokens": rng.choice([0, 3, 70]), "recent_tokens": rng.choice([0, 2, 65])}
    spec = foscar.CacheSpec(rng.choice(quants), rng.choice(quants), rng.choice([1, 3]), 64, **windows)
    batch = rng.choice([1, 3, 40])
    pair = Pair(spec, batch, 12, torch.bfloat16, machine)
    for _ in range(6):
        pair.append([rng.choice([0, 1, 1, 2, rng.randrange(100)]) for _ in range(batch)])
        if rng.random() < 0.5 and not spec.block_wise:
            pair.seq_lens = [rng.choice([length, max(length - rng.randrange(5), 0), 0]) for length in pair.seq_lens]


def test_awkward_values(machine: torch.device) -> None:
    """Constants, zeros of both signs, ties, tiny and huge ranges."""
    pair = Pair(T(2, 1, 64), 1, 2, torch.float32, machine)
    rows = [
        torch.zeros(64),
        -torch.zeros(64),
        torch.tensor([0.0, -0.0] * 32),
        torch.full((64,), -3.7),
        torch.arange(64) % 4 * 1.0,
        torch.arange(64) / 2,
        torch.randn(64) * 1e-38,
        torch.randn(64) * 1e38,
        torch.randn(64) + 1e6,
        torch.arange(64) * 2.0**-70,
    ]
    pair.append([2 * len(rows)], torch.stack(rows * 2)[None, :, None].expand(2, -1, -1, -1))


@pytest.mark.parametrize("clip", [0.01, 0.5, 0.96, 0.999])
def test_clipping(clip: float, machine: torch.device) -> None:
    quants = [replace(quant, clip=clip) for quant in quant_specs(64)]
    for k, v in zip(quants, quants[1:] + quants[:1], strict=True):
        Pair(foscar.CacheSpec(k, v, 1, 64, sink_tokens=5), 1, 2, torch.bfloat16, machine).append([100])


def test_views_and_bad_tables(machine: torch.device) -> None:
    """Rows of a packed projection; pages that are not the cache's are not written."""
    spec = T(2, 2, 64)
    pair = Pair(spec, 2, 2, torch.bfloat16, machine)
    qkv = torch.randn(90, 8 * 64).bfloat16()
    k, v = (qkv[:, begin : begin + 128].view(90, 2, 64) for begin in (256, 384))
    ends, lens = i32([0, 50, 90]), i32([0, 0])
    cache = pair.caches[1]
    run(cache, k, v, pair.table, lens, ends, pair.seq_ids)
    want = pair.caches[0]
    foscar.append(want, k, v, pair.table, lens, ends, seq_ids=pair.seq_ids)
    assert snapshot(cache) == snapshot(want)
    before = snapshot(cache)
    for table in (torch.full_like(pair.table, -1), torch.full_like(pair.table, len(cache.pages)), pair.table[:, :0]):
        run(cache, k, v, table, lens, ends, pair.seq_ids)
        assert snapshot(cache) == before


def test_sequences_that_are_not_the_caches(machine: torch.device) -> None:
    pair = Pair(T(2, 2, 64, recent_tokens=9), 2, 1, torch.bfloat16, machine)
    pair.append([3, 3])
    cache, kv = pair.caches[1], torch.randn(2, 4, 2, 64).bfloat16()
    before = snapshot(cache)
    for ids in (i32([-1, 99]), i32([4, 4])):
        run(cache, *kv, pair.table, i32([3, 3]), i32([0, 2, 4]), ids)
        assert snapshot(cache) == before


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rotary_embedding(is_neox: bool, dtype: torch.dtype, machine: torch.device) -> None:
    """Of all channels or of some; keys that wait in the ring are not turned again."""
    for spec, rotary_dim in (
        (T(4, 2, 96), 32),
        (K(2, 1, 64, sink_tokens=3, recent_tokens=20), 64),
        (T(2, 1, 128), 128),
    ):
        angles = torch.arange(300)[:, None] / 10_000 ** (torch.arange(rotary_dim // 2) / rotary_dim * 2)
        cos_sin_cache = torch.cat([angles.cos(), angles.sin()], 1)
        pair = Pair(spec, 2, 5, dtype, machine)
        for counts in ([70, 3], [1, 1], [30, 66]):
            pair.append(counts, angles=cos_sin_cache, is_neox=is_neox)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotations(head_dim: int, dtype: torch.dtype, machine: torch.device) -> None:
    """After rotary embedding, before anything else; exact tokens are not rotated again when they leave the ring."""
    plain, transformed = foscar.QuantSpec(4), foscar.QuantSpec(2, hadamard=True)
    matrix = torch.linalg.qr(torch.randn(head_dim, head_dim))[0]
    angles = torch.rand(300, 32) * 6
    cos_sin_cache = torch.cat([angles.cos(), angles.sin()], 1)
    for k, v, windows in ((plain, transformed, WINDOWS[0]), (transformed, plain, WINDOWS[1])):
        rotations = [None if quant.hadamard else matrix.to(dtype) for quant in (k, v)]
        pair = Pair(foscar.CacheSpec(k, v, 1, head_dim, **windows), 2, 5, dtype, machine, rotations)
        for counts in ([70, 3], [1, 1], [17, 66]):
            pair.append(counts, angles=cos_sin_cache)


def test_only_one_operand_is_rotated(machine: torch.device) -> None:
    channel_wise = foscar.QuantSpec(2, "channel", hadamard=True)
    Pair(foscar.CacheSpec(channel_wise, foscar.QuantSpec(2), 2, 64), 2, 3, torch.bfloat16, machine).append([70, 64])
    rotations = None, -torch.eye(64, dtype=torch.bfloat16)
    Pair(T(4, 2, 64), 2, 3, torch.bfloat16, machine, rotations).append([70, 64])


def test_lengths_that_are_none(machine: torch.device) -> None:
    """Where nothing is checked, nothing outside of the cache, or of the sequence, is written."""
    pair = Pair(T(2, 1, 64, sink_tokens=2, recent_tokens=9), 2, 2, torch.bfloat16, machine)
    pair.append([30, 30])
    cache, kv = pair.caches[1], torch.randn(2, 4, 1, 64).bfloat16()
    before = snapshot(cache)
    for lengths, ends in (([-1, -70], [0, 2, 4]), ([30, 30], [0, 0, 0]), ([30, 30], [4, 2, 0])):
        run(cache, *kv, pair.table, i32(lengths), i32(ends), pair.seq_ids)
        assert snapshot(cache) == before


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs a C++ compiler, g++")
def test_what_is_prepared_for_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of any strides, rows that are not aligned; by warps where sequences get few tokens; nothing for none."""
    spec, arrivals, launched = T(2, 2, 64, recent_tokens=9), torch.full((3,), -1, dtype=torch.int32), []

    def launch(config: AppendConfig, arguments: ctypes.Structure, ctas: int, stream: int) -> None:
        launched.append(arguments.by_warps)
        emulator.launch(config, arguments, ctas, stream)

    monkeypatch.setattr(append_kernel, "load", lambda config, _: partial(launch, config))
    monkeypatch.setattr(append_kernel, "workspace", lambda *_: arrivals.data_ptr())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    caches = [foscar.PagedKVCache(spec, 9, dtype=torch.bfloat16, max_seqs=5) for _ in range(2)]
    table = torch.randperm(9, dtype=torch.int32).view(3, 3).T
    seq_ids = torch.tensor([[4, 9], [0, 9], [2, 9]], dtype=torch.int32)[:, 0]
    angles = torch.randn(300, 64)[:, ::2]
    for lens, ends in (([0, 0, 0], [0, 90, 93, 93]), ([90, 3, 0], [0, 1, 2, 3]), ([91, 4, 1], [0, 0, 0, 0])):
        k, v = torch.randn(2, ends[-1], 2, 65).bfloat16()[..., 1:]
        tables = (table, torch.stack([i32(lens)] * 2, 1)[:, 0], i32(ends), seq_ids, angles, True, None, None, spec)
        for cache, call in zip(caches, (reference.append, append_kernel.append), strict=True):
            call(cache.pages, cache.exact, cache.lengths, k, v, *tables)
        assert snapshot(caches[0]) == snapshot(caches[1])
    assert launched == [False, True]
