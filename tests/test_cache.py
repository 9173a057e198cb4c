from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from helpers import all_specs, i32, make_batch, poison, snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import foscar
from foscar.layout import PAGE_SIZE

WINDOWS = [(0, 0), (4, 0), (0, 1), (0, 30), (64, 128), (100, 7), (200, 64)]


def window_specs() -> list[foscar.CacheSpec]:
    return [
        foscar.CacheSpec(foscar.QuantSpec(2, k), foscar.QuantSpec(4, v), 2, 64, sinks, recent)
        for (k, v), (sinks, recent) in itertools.product(
            [("token", "token"), ("channel", "token"), ("channel", "channel")], WINDOWS
        )
    ]


def contents(
    spec: foscar.CacheSpec, k: torch.Tensor, v: torch.Tensor, steps: list[int], device: torch.device
) -> list[bytes]:
    """Append in steps; the pages' bytes, where the ring begins, and what reads back. Ring slots keep stale tokens."""
    cache = foscar.PagedKVCache(spec, 8, device, k.dtype, max_seqs=1)
    table = i32([[5, 0, 3, 7, 1, 2, 4, 6]], device)
    done = 0
    for step in steps:
        tokens = slice(done, done + step)
        foscar.append(cache, k[tokens], v[tokens], table, i32([done], device), i32([0, step], device))
        done += step
    assert done == len(k)
    tensors = (cache.pages, cache.lengths, *foscar.dequantize(cache, table, i32([done], device)))
    return [tensor.cpu().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", window_specs(), ids=str)
def test_token_by_token_equals_at_once(spec: foscar.CacheSpec, dtype: torch.dtype, device: torch.device) -> None:
    k, v = (torch.randn(270, 2, 64, device=device).to(dtype) for _ in range(2))
    want = contents(spec, k, v, [270], device)
    for steps in ([1] * 270, [63, 1, 1, 0, 64, 130, 11], [200, 69, 1], [101, 169]):
        assert contents(spec, k, v, steps, device) == want


@pytest.mark.parametrize("spec", all_specs(2), ids=str)
def test_token_by_token_equals_at_once_for_every_format(spec: foscar.CacheSpec, device: torch.device) -> None:
    k, v = torch.randn(2, 66, 2, spec.head_dim, device=device)
    want = contents(spec, k, v, [66], device)
    assert contents(spec, k, v, [1] * 66, device) == want


@pytest.mark.parametrize("spec", window_specs(), ids=str)
def test_what_is_kept_in_the_models_precision(spec: foscar.CacheSpec, device: torch.device) -> None:
    lengths = [0, 1, 5, 63, 64, 65, 127, 128, 200, 300]
    batch = make_batch(spec, lengths, device, torch.bfloat16)
    for b, (k, v) in enumerate(batch.dequantized()):
        exact = torch.zeros(lengths[b], dtype=torch.bool)
        exact[: spec.sink_tokens] = True
        exact[spec.quantized_len(lengths[b]) :] = True
        assert exact[max(lengths[b] - spec.recent_tokens, 0) :].all()
        if spec.block_wise:
            assert exact[lengths[b] // PAGE_SIZE * PAGE_SIZE :].all()
        for got, want in ((k, batch.k[b]), (v, batch.v[b])):
            same = (got == want.float()).flatten(1).all(1).cpu()
            assert torch.equal(same, exact)


def test_a_batch_equals_its_sequences_one_by_one(device: torch.device) -> None:
    for spec in (
        foscar.CacheSpec.token_wise(2, 2, 64),
        foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=9, recent_tokens=9),
    ):
        batch = make_batch(spec, [3, 200, 0, 64, 65], device)
        for b, (k, v) in enumerate(batch.dequantized()):
            alone = make_batch(spec, [len(k)], device, kv=([batch.k[b]], [batch.v[b]]))
            k_alone, v_alone = alone.dequantized()[0]
            assert torch.equal(k, k_alone) and torch.equal(v, v_alone)


def test_sequences_at_different_phases_in_one_append(device: torch.device) -> None:
    for spec in window_specs():
        batch = make_batch(spec, [0, 3, 127, 191], device)
        new = [70, 0, 1, 65]
        k, v = (torch.randn(sum(new), 2, 64, device=device) for _ in range(2))
        table = batch.block_table.clone()
        free = sorted(set(range(batch.cache.pages.shape[0])) - set(table.flatten().tolist()))
        for row, length in zip(table, (70, 3, 128, 256), strict=True):
            for column in range(-(-length // PAGE_SIZE)):
                if not 0 <= row[column] < batch.cache.pages.shape[0]:
                    row[column] = free.pop()
        ends = i32([0, *itertools.accumulate(new)], device)
        foscar.append(batch.cache, k, v, table, batch.seq_lens, ends, seq_ids=batch.seq_ids)
        got = foscar.dequantize(batch.cache, table, batch.seq_lens + i32(new, device), seq_ids=batch.seq_ids)
        for name, values, kept, added in (("k", got[0], batch.k, k), ("v", got[1], batch.v, v)):
            want = [
                make_batch(spec, [len(x)], device, kv=([x], [x])).dequantized()[0]["kv".index(name)]
                for x in (torch.cat(pair) for pair in zip(kept, added.split(new), strict=True))
            ]
            assert torch.equal(values, torch.cat(want))


def test_strided_views_of_a_packed_qkv(device: torch.device) -> None:
    spec = foscar.CacheSpec.token_wise(2, 2, 64)
    qkv = torch.randn(100, 8, 64, device=device)
    packed = make_batch(spec, [100], device, kv=([qkv[:, 4:6]], [qkv[:, 6:]]))
    table, zero, ends = packed.block_table, i32([0], device), i32([0, 100], device)
    cache = foscar.PagedKVCache(spec, packed.cache.pages.shape[0], device)
    poison(cache)
    foscar.append(cache, qkv[:, 4:6], qkv[:, 6:], table, zero, ends)
    assert torch.equal(cache.pages, packed.cache.pages)


def test_exact_tokens_are_allocated_in_the_models_dtype() -> None:
    spec = foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=3, recent_tokens=5)
    lazy = foscar.PagedKVCache(spec, 4, max_seqs=7)
    assert lazy.exact.shape == (0, 2, 2, 72, 64)
    assert lazy.nbytes == 4 * 2 * spec.record_bytes + 7 * 8
    k = torch.randn(3, 2, 64, dtype=torch.float16)
    foscar.append(lazy, k, k, i32([[0]]), i32([0]), i32([0, 3]))
    eager = foscar.PagedKVCache(spec, 4, dtype=torch.float16, max_seqs=7)
    assert lazy.exact.dtype == eager.exact.dtype == torch.float16
    assert lazy.exact.shape == eager.exact.shape == (7, 2, 2, 72, 64)
    assert lazy.nbytes == eager.nbytes == 4 * 2 * spec.record_bytes + 7 * 8 + 7 * 2 * 2 * 72 * 64 * 2
    assert foscar.PagedKVCache(foscar.CacheSpec.token_wise(2, 2, 64), 4).nbytes == 4 * 2 * 2560
    assert repr(lazy) == f"PagedKVCache({spec}, num_pages=4, {lazy.nbytes:,} bytes on cpu)"


@pytest.mark.parametrize("spec", window_specs(), ids=str)
def test_sequence_bytes_is_what_a_sequence_takes(spec: foscar.CacheSpec) -> None:
    for length in (0, 1, 64, 65, 300):
        cache = foscar.PagedKVCache(spec, 8, dtype=torch.bfloat16, max_seqs=1)
        manager = foscar.BlockManager(cache)
        x = torch.randn(length, 2, 64).bfloat16()
        manager.append([manager.new()], x, x)
        pages = 8 - manager.free_pages
        assert spec.sequence_bytes(length) == pages * 2 * spec.record_bytes + cache.exact.nbytes


def test_new_sequences_reuse_rows_and_pages() -> None:
    """Whatever an earlier owner left in a row or a page has no effect."""
    spec = foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=4, recent_tokens=20)
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 4, max_seqs=2))
    x, y = torch.randn(200, 2, 64), torch.randn(90, 2, 64)
    first = manager.new()
    manager.append([first], x, x)
    manager.free(first)
    again = manager.new()
    manager.append([again], y, y)
    want = make_batch(spec, [90], kv=([y], [y])).dequantized()[0]
    got = foscar.dequantize(manager.cache, **manager.tables([again]))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert manager.free_pages == 3


def test_running_out() -> None:
    spec = foscar.CacheSpec.token_wise(2, 2, 64, recent_tokens=8)
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 2, dtype=torch.float32, max_seqs=2))
    a, b = manager.new(), manager.new()
    with pytest.raises(foscar.OutOfPagesError, match="max_seqs=2"):
        manager.new()
    with pytest.raises(foscar.OutOfPagesError, match="max_seqs=2"):
        manager.fork(a)
    x = torch.randn(150, 2, 64)
    before = snapshot(manager.cache)
    with pytest.raises(foscar.OutOfPagesError, match="3 pages are needed, 2 are free"):
        manager.append([a], x, x)
    bad = x[:100].clone()
    bad[3, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"k\[3, 0, 0\]=nan"):
        manager.append([a, b], bad, bad)
    assert snapshot(manager.cache) == before
    assert (manager.free_pages, manager.length(a), manager.length(b)) == (2, 0, 0)
    manager.append([a, b], x[:100], x[:100], [100, 0])
    assert (manager.free_pages, manager.length(a), manager.length(b)) == (0, 100, 0)


def test_manager_without_window_numbers_sequences_freely() -> None:
    manager = foscar.BlockManager(foscar.PagedKVCache(foscar.CacheSpec.token_wise(2, 2, 64), 100, max_seqs=1))
    ids = [manager.new() for _ in range(100)]
    manager.append(ids, torch.randn(100, 2, 64), torch.randn(100, 2, 64))
    assert manager.free_pages == 0
    manager.free(ids[3])
    assert manager.new() == ids[3] and manager.free_pages == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m.append([], x, x), r"seq_ids=\[\]"),
        (lambda m, x: m.append([0, 0], x, x), r"seq_ids=\[0, 0\]: must be distinct"),
        (lambda m, x: m.append([0, 1], x[:3], x[:3]), r"k.shape\[0\]=3: must be a multiple of the 2 sequences"),
        (lambda m, x: m.append([0], x, x, [1, 3]), r"num_tokens=\[1, 3\]: must be 1 numbers that add up to .* 4"),
        (lambda m, x: m.append([0], x, x, [3]), r"num_tokens=\[3\]: must be 1 numbers that add up to .* 4"),
        (lambda m, x: m.append([0, 1], x, x, [5, -1]), r"num_tokens\[1\]=-1: must be an int of at least 0"),
        (lambda m, x: m.truncate(0, 2.0), r"length=2.0: must be an int"),
        (lambda m, x: m.append([7], x, x), r"seq_id=7: must be one of \[0, 1\]"),
        (lambda m, x: m.length(7), r"seq_id=7"),
        (lambda m, x: m.free(7), r"seq_id=7"),
        (lambda m, x: m.fork(7), r"seq_id=7"),
        (lambda m, x: m.tables([7]), r"seq_id=7"),
        (lambda m, x: m.truncate(0, -1), r"length=-1: must be an int of at least 0"),
        (lambda m, x: m.truncate(0, 101), r"length=101: must be at most the sequence's, 100"),
        (lambda m, x: m.truncate(0, 63), r"length=63: must be at least 64, a multiple of 64, or within the sinks"),
    ],
)
def test_bad_manager_calls(call: object, message: str) -> None:
    spec = foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=4)
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 8))
    manager.append([manager.new(), manager.new()], torch.randn(100, 2, 64), torch.randn(100, 2, 64), [100, 0])
    before, free = snapshot(manager.cache), manager.free_pages
    with pytest.raises(ValueError, match=message):
        call(manager, torch.randn(4, 2, 64))  # type: ignore[operator]
    assert snapshot(manager.cache) == before and manager.free_pages == free


def test_exact_rows_are_where_the_format_says() -> None:
    spec = foscar.CacheSpec.token_wise(2, 2, 64, sink_tokens=3, recent_tokens=7)
    batch = make_batch(spec, [40])
    rows = batch.cache.exact[batch.seq_ids[0]]
    for position in (*range(3), *range(33, 40)):
        row = position if position < 3 else 3 + position % 7
        assert torch.equal(rows[:, 0, row], batch.k[0][position]) and torch.equal(rows[:, 1, row], batch.v[0][position])
    assert batch.cache.lengths[batch.seq_ids[0]].tolist() == [33, 40]


def test_rows_without_new_tokens_change_nothing() -> None:
    """Such rows pad a batch; they may name any sequence, also one that the same append writes."""
    for spec in (
        foscar.CacheSpec.kivi(2, 2, 64),
        foscar.CacheSpec.token_wise(4, 2, 64, sink_tokens=4, recent_tokens=9),
    ):
        batch = make_batch(spec, [130, 70])
        before = snapshot(batch.cache)
        none = torch.empty(0, 2, 64)
        for lens in ([130, 70], [0, 64], [10, 0]):
            ids = batch.seq_ids[[0, 0]]
            foscar.append(batch.cache, none, none, batch.block_table, i32(lens), i32([0, 0, 0]), seq_ids=ids)
            assert snapshot(batch.cache) == before


def test_an_empty_batch() -> None:
    for spec in (foscar.CacheSpec.kivi(2, 2, 64), foscar.CacheSpec.token_wise(4, 2, 64)):
        cache = foscar.PagedKVCache(spec, 2)
        none, table, lens = torch.empty(0, 2, 64), torch.empty(0, 3, dtype=torch.int32), i32([])
        foscar.append(cache, none, none, table, lens, i32([0]))
        assert foscar.dequantize(cache, table, lens)[0].shape == (0, 2, 64)
        assert foscar.decode_attention(torch.empty(0, 4, 64), cache, table, lens).shape == (0, 4, 64)


def test_a_gap_is_noticed_where_lengths_are_known() -> None:
    spec = foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=4, recent_tokens=20)
    batch = make_batch(spec, [100])
    x = torch.randn(1, 2, 64)
    tables = {"block_table": batch.block_table, "seq_ids": batch.seq_ids, "cu_seqlens": i32([0, 1])}
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=101: must not exceed the tokens appended for seq_id \d, 100"):
        foscar.append(batch.cache, x, x, seq_lens=i32([101]), **tables)
    foscar.append(batch.cache, x, x, seq_lens=i32([100]), **tables)


def test_a_sequence_may_begin_on_shared_pages() -> None:
    for spec in (foscar.CacheSpec.kivi(2, 2, 64), foscar.CacheSpec.token_wise(4, 2, 64, recent_tokens=9)):
        batch = make_batch(spec, [137])
        other = next(i for i in range(3) if i != batch.seq_ids[0])
        batch.cache.lengths[other] = i32([128, 128])
        x, (k, _) = torch.randn(3, 2, 64), batch.dequantized()[0]
        ids = i32([other])
        free = next(p for p in range(6) if p not in batch.block_table)
        table = torch.cat([batch.block_table[:, :2], i32([[free]])], 1)
        foscar.append(batch.cache, x, x, table, i32([128]), i32([0, 3]), seq_ids=ids)
        k_hat, _ = foscar.dequantize(batch.cache, table, i32([131]), seq_ids=ids)
        assert torch.equal(k_hat[:128], k[:128]) and torch.equal(k_hat[128:], x)
        assert torch.equal(batch.dequantized()[0][0], k)


def test_appending_again_inside_the_sinks() -> None:
    spec = foscar.CacheSpec.kivi(2, 2, 64, sink_tokens=100, recent_tokens=7)
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 8, max_seqs=1))
    seq, x = manager.new(), torch.randn(240, 2, 64)
    manager.append([seq], x[:200], x[:200])
    manager.truncate(seq, 90)
    for tokens in (x[90:115], x[115:120], x[120:240]):
        manager.append([seq], tokens, tokens)
    k, _ = foscar.dequantize(manager.cache, **manager.tables([seq]))
    want = make_batch(spec, [240], kv=([x], [x])).dequantized()[0][0]
    assert torch.equal(k, want)


@pytest.mark.parametrize("sinks", [0, 1, 32, 60])
def test_clip_looks_at_the_tokens_that_are_quantised(sinks: int) -> None:
    """A block that begins with sinks is quantised as if its other tokens were all there is."""
    x = torch.randn(64, 1, 64)
    quant = foscar.QuantSpec(4, "channel", clip=0.9)
    spec = foscar.CacheSpec(quant, quant, 1, 64, sink_tokens=sinks)
    k, _ = make_batch(spec, [64], kv=([x], [x])).dequantized()[0]
    rest = x[sinks:]
    # The magnitude that a tenth of the tokens exceeds, give or take one of them.
    magnitudes = rest.abs().sort(0).values
    limit = magnitudes[min(int(0.9 * len(rest)) + 1, len(rest) - 1)]
    assert torch.equal(k[:sinks], x[:sinks])
    assert (k[sinks:].abs() <= limit * 1.02).all()
    kept = rest.abs() <= magnitudes[max(int(0.9 * len(rest)) - 1, 0)]
    assert ((k[sinks:] - rest).abs()[kept] <= 2 * limit.expand_as(rest)[kept] / 15 / 2 * 1.05).all()


def test_pages_come_back() -> None:
    spec = foscar.CacheSpec.token_wise(2, 2, 64)
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 4))
    a, x = manager.new(), torch.randn(200, 2, 64)
    manager.append([a], x, x)
    assert manager.free_pages == 0
    manager.truncate(a, 65)
    assert manager.free_pages == 2
    b = manager.fork(a)
    y = torch.randn(200, 2, 64)
    with pytest.raises(foscar.OutOfPagesError):
        manager.append([b], y, y)
    want, _ = foscar.dequantize(manager.cache, **manager.tables([b]))
    manager.append([a], y[:60], y[:60])  # copies the page that it shares with b
    assert torch.equal(foscar.dequantize(manager.cache, **manager.tables([b]))[0], want)
    manager.free(a)
    manager.free(b)
    assert manager.free_pages == 4


class Histories(RuleBasedStateMachine):
    """Random appends, forks, truncations and frees, against plain lists of tokens."""

    @initialize(spec=st.sampled_from(window_specs()), seed=st.integers(0, 2**31))
    def begin(self, spec: foscar.CacheSpec, seed: int) -> None:
        self.spec = spec
        self.rng = torch.Generator().manual_seed(seed)
        self.cache = foscar.PagedKVCache(spec, 24, dtype=torch.bfloat16, max_seqs=4)
        poison(self.cache)
        self.manager = foscar.BlockManager(self.cache)
        self.tokens: dict[int, torch.Tensor] = {}

    def draw_tokens(self, n: int) -> torch.Tensor:
        return torch.randn(n, 2, 2, 64, generator=self.rng).bfloat16()

    @precondition(lambda self: len(self.tokens) < 4)
    @rule()
    def new(self) -> None:
        self.tokens[self.manager.new()] = self.draw_tokens(0)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        counts = [data.draw(st.sampled_from([0, 1, 2, 31, 63, 64, 65, 130])) for _ in ids]
        new = self.draw_tokens(sum(counts))
        try:
            self.manager.append(ids, new[:, 0], new[:, 1], counts)
        except foscar.OutOfPagesError:
            return
        if len(new) and data.draw(st.integers(0, 4)) == 0:
            bad = new.clone()
            bad[-1, 1, 1, 63] = torch.nan
            with contextlib.suppress(foscar.OutOfPagesError), pytest.raises(ValueError, match="=nan"):
                self.manager.append(ids, bad[:, 0], bad[:, 1], counts)
        for seq_id, tokens in zip(ids, new.split(counts), strict=True):
            self.tokens[seq_id] = torch.cat([self.tokens[seq_id], tokens])

    @precondition(lambda self: 0 < len(self.tokens) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tokens[self.manager.fork(seq_id)] = self.tokens[seq_id]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        length = data.draw(st.integers(0, len(self.tokens[seq_id])))
        try:
            self.manager.truncate(seq_id, length)
        except ValueError:
            assert self.spec.block_wise and length % PAGE_SIZE and length > self.spec.sink_tokens
            return
        self.tokens[seq_id] = self.tokens[seq_id][:length]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(seq_id)
        del self.tokens[seq_id]

    @invariant()
    def every_token_reads_back(self) -> None:
        if not getattr(self, "tokens", None):
            return
        ids = sorted(self.tokens)
        tables = self.manager.tables(ids)
        assert tables["seq_lens"].tolist() == [len(self.tokens[i]) for i in ids]
        k, v = foscar.dequantize(self.cache, **tables)
        want = torch.cat([self.tokens[i] for i in ids]).float()
        for got, exact, quant in ((k, want[:, 0], self.spec.k), (v, want[:, 1], self.spec.v)):
            # A step is at most the range of what is quantised together over the levels; draws are within ±6.
            assert ((got - exact).abs() <= 12 / quant.levels / 2 * 1.01).all()
            start = 0
            for i in ids:
                length = len(self.tokens[i])
                position = torch.arange(length)
                kept = (position < self.spec.sink_tokens) | (position >= self.quantized(i))
                assert torch.equal(got[start : start + length][kept], exact[start : start + length][kept])
                start += length

    def quantized(self, seq_id: int) -> int:
        """Where the ring begins, by the cache; the manager must know it, too."""
        length = len(self.tokens[seq_id])
        mirrored = self.manager._entries[seq_id].quantized
        if self.spec.exact_tokens and length:
            assert mirrored == min(self.cache.lengths[seq_id, 0].item(), length)
        assert length - mirrored <= self.spec.ring_tokens or mirrored < self.spec.sink_tokens
        return mirrored

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not getattr(self, "tokens", None):
            return
        table = self.manager.tables(sorted(self.tokens))["block_table"]
        used = set(table.flatten().tolist()) - {-1}
        assert len(used) == 24 - self.manager.free_pages


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [32, 64])
def test_rotary_embedding(is_neox: bool, rotary_dim: int, device: torch.device) -> None:
    """As complex numbers that are turned by their tokens' angles, whatever is kept exact, and at any append."""
    spec = foscar.CacheSpec.token_wise(4, 2, 64, sink_tokens=2, recent_tokens=20)
    angles = torch.arange(150)[:, None] / 100.0 ** (torch.arange(rotary_dim // 2) / rotary_dim * 2)
    cos_sin_cache = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    k, v = torch.randn(2, 100, 2, 64, device=device)
    part = k[..., :rotary_dim].double()
    pairs = part.unflatten(-1, (2, -1)).transpose(-1, -2) if is_neox else part.unflatten(-1, (-1, 2))
    turns = torch.polar(torch.ones_like(angles).double(), angles.double())[:100, None].to(device)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    turned = (turned.transpose(-1, -2) if is_neox else turned).flatten(-2)
    want = torch.cat([turned.float(), k[..., rotary_dim:]], -1)
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 8, device, torch.float32, max_seqs=2))
    seq, other = manager.new(), manager.new()
    for rows in (slice(0, 1), slice(1, 70), slice(70, 100)):
        manager.append([seq], k[rows], v[rows], cos_sin_cache=cos_sin_cache, is_neox=is_neox)
    manager.append([other], want, v)
    (got, got_v), (plain, plain_v) = (foscar.dequantize(manager.cache, **manager.tables([s])) for s in (seq, other))
    assert torch.equal(got_v, plain_v)
    assert ((got - plain).abs() > 1e-4).sum() < 20 and (got - plain).abs().max() < 0.5  # a code's step, here and there
    assert torch.allclose(got[80:], want[80:], atol=1e-5)
    with pytest.raises(ValueError, match=rf"cos_sin_cache.shape=\[150, {rotary_dim}\]: sequence 0 needs 160 positions"):
        manager.append([seq], k[:60], v[:60], cos_sin_cache=cos_sin_cache)
    # Rows without tokens need no positions; keys must be finite after they are turned, too.
    cache, table = foscar.PagedKVCache(spec, 2, device, torch.float16, max_seqs=1), i32([[0]], device)
    none, zeros = torch.zeros(0, 2, 64, device=device).half(), i32([0, 0], device)
    foscar.append(cache, none, none, table, i32([0], device), zeros, cos_sin_cache=cos_sin_cache[:0], is_neox=is_neox)
    large = torch.full((3, 2, 64), 60000.0, device=device).half()
    with pytest.raises(ValueError, match="k, turned,"):
        where = table, i32([0], device), i32([0, 3], device)
        foscar.append(cache, large, large, *where, cos_sin_cache=cos_sin_cache[78:], is_neox=is_neox)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_only_finite_values_are_stored(dtype: torch.dtype, value: float, device: torch.device) -> None:
    cache = foscar.PagedKVCache(foscar.CacheSpec.token_wise(2, 1, 64), 1, device)
    k = torch.ones(2, 1, 64, device=device).to(dtype)
    bad = k.clone()
    bad[1, 0, 5] = value
    where = i32([[0]], device), i32([0], device), i32([0, 2], device)
    for name, pair in (("k", (bad, k)), ("v", (k, bad))):
        with pytest.raises(ValueError, match=rf"{name}\[1, 0, 5\]={value}: must be finite"):
            foscar.append(cache, *pair, *where)
    assert (cache.pages == 0).all()
