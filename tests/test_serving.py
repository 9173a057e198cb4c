"""Long histories on a GPU, next to the same ones on a CPU: caches that hold the same bytes in the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers import Batch, i32, oracle, relative_error, snapshot

import foscar
from foscar.layout import PAGE_SIZE

pytestmark = pytest.mark.gpu
T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi
SPECS = [T(2, 2, 64), T(4, 2, 64, sink_tokens=4, recent_tokens=30), K(2, 2, 64, recent_tokens=20)]
SLOTS, COLUMNS, LONGEST = 5, 8, 8 * PAGE_SIZE


class Server:
    """A batch of slots whose sequences join and leave, served by one graph that appends, then attends."""

    def __init__(self, spec: foscar.CacheSpec) -> None:
        self.gpu = torch.device("cuda", 0)
        devices = (torch.device("cpu"), self.gpu)
        self.mirror, self.cache = (
            foscar.PagedKVCache(spec, SLOTS * COLUMNS, device, torch.bfloat16, SLOTS) for device in devices
        )
        self.rng = random.Random(0)
        self.free = self.rng.sample(range(SLOTS * COLUMNS), SLOTS * COLUMNS)
        self.lengths: dict[int, int] = {}  # of slots in use
        self.table = torch.full((SLOTS, COLUMNS), -1, dtype=torch.int32)
        self.rows = torch.randperm(SLOTS, dtype=torch.int32)
        # What the graph reads.
        self.kv = torch.zeros(2, SLOTS, 2, 64, dtype=torch.bfloat16, device=self.gpu)
        self.q = torch.zeros(SLOTS, 8, 64, dtype=torch.bfloat16, device=self.gpu)
        self.out = torch.empty_like(self.q)
        self.tables = {"block_table": self.table.to(self.gpu), "seq_ids": self.rows.to(self.gpu)}
        self.before, self.after = (torch.zeros(SLOTS, dtype=torch.int32, device=self.gpu) for _ in range(2))
        self.ends = torch.zeros(SLOTS + 1, dtype=torch.int32, device=self.gpu)
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        foscar.append(self.cache, *self.kv, seq_lens=self.before, cu_seqlens=self.ends, **self.tables)
        foscar.decode_attention(self.q, self.cache, seq_lens=self.after, out=self.out, **self.tables)

    def leave(self, slot: int) -> None:
        del self.lengths[slot]
        self.free += [page for page in self.table[slot].tolist() if page >= 0]
        self.rng.shuffle(self.free)
        self.table[slot] = -1

    def join(self, slot: int, tokens: int) -> None:
        self.lengths[slot] = tokens
        self.take_pages(slot, tokens)
        kv = torch.randn(2, tokens, 2, 64).bfloat16()
        for cache in (self.mirror, self.cache):
            there = (*kv, self.table[slot : slot + 1], i32([0]), i32([0, tokens]))
            ids = self.rows[slot : slot + 1].to(cache.device)
            foscar.append(cache, *(tensor.to(cache.device) for tensor in there), seq_ids=ids)

    def take_pages(self, slot: int, tokens: int) -> None:
        for column in range(-(-tokens // PAGE_SIZE)):
            if self.table[slot, column] < 0:
                self.table[slot, column] = self.free.pop()

    def step(self) -> None:
        """One token for each slot in use."""
        for slot in range(SLOTS):
            if slot not in self.lengths:
                if self.rng.random() < 0.1:
                    self.join(slot, self.rng.choice([0, 1, 63, 64, self.rng.randrange(200)]))
            elif self.lengths[slot] == LONGEST or self.rng.random() < 0.01:
                self.leave(slot)
        lens = [self.lengths.get(slot, 0) for slot in range(SLOTS)]
        for slot, length in self.lengths.items():
            self.take_pages(slot, length + 1)
        ends = i32([0, *(slot in self.lengths for slot in range(SLOTS))]).cumsum(0, dtype=torch.int32)
        kv = torch.randn(2, SLOTS, 2, 64).bfloat16()
        own = kv[:, : len(self.lengths)]  # rows of slots that are not in use are nobody's
        foscar.append(self.mirror, *own, self.table, i32(lens), ends, seq_ids=self.rows)
        self.lengths = {slot: length + 1 for slot, length in self.lengths.items()}
        self.kv.copy_(kv)
        self.q.copy_(torch.randn(self.q.shape))
        self.tables["block_table"].copy_(self.table)
        self.before.copy_(i32(lens))
        self.after.copy_(i32([self.lengths.get(slot, 0) for slot in range(SLOTS)]))
        self.ends.copy_(ends)
        self.out.fill_(torch.nan)
        self.graph.replay()

    def check(self) -> None:
        batch = Batch(self.cache, self.tables["block_table"], self.after, self.tables["seq_ids"], [], [])
        for b, (k, v) in enumerate(batch.dequantized()):
            assert relative_error(self.out[b], oracle(self.q[b : b + 1], k, v)[0][0]) <= 3e-3


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_thousand_steps_of_a_graph(spec: foscar.CacheSpec) -> None:
    server = Server(spec)
    for step in range(1000):
        server.step()
        if step % 50 == 49:
            server.check()
            assert snapshot(server.cache) == snapshot(server.mirror)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_histories_of_a_manager(spec: foscar.CacheSpec, seed: int) -> None:
    """Appends of any length, forks, truncations, ends and reorders, until pages run out, and on."""
    rng = random.Random(seed)
    spec = replace(spec, num_kv_heads=1)
    caches = [foscar.PagedKVCache(spec, 40, device, torch.bfloat16, 6) for device in ("cpu", "cuda:0")]
    managers = [foscar.BlockManager(cache) for cache in caches]
    seqs: list[int] = []
    for _ in range(150):
        what = rng.choice(["new", "append", "append", "append", "append", "fork", "truncate", "free", "reorder"])
        if what == "new" and len(seqs) < 6:
            seqs += {manager.new() for manager in managers}
        if not seqs:
            continue
        seq = rng.choice(seqs)
        length = managers[0].length(seq)
        if what == "append":
            chosen = rng.sample(seqs, rng.randint(1, min(3, len(seqs))))
            counts = [rng.choice([0, 1, 1, 5, 64, rng.randrange(150)]) for _ in chosen]
            kv = torch.randn(2, sum(counts), 1, 64).bfloat16()
            failures = 0
            for manager in managers:
                try:
                    manager.append(chosen, *kv.to(manager.cache.device), counts)
                except foscar.OutOfPagesError:
                    failures += 1
            assert failures in (0, 2)
        elif what == "fork" and len(seqs) < 6:
            seqs += {manager.fork(seq) for manager in managers}
        elif what == "truncate":
            kept = length // PAGE_SIZE * PAGE_SIZE if spec.block_wise else rng.randint(max(length - 9, 0), length)
            for manager in managers:
                manager.truncate(seq, kept)
        elif what == "free" and len(seqs) > 2:
            for manager in managers:
                manager.free(seq)
            seqs.remove(seq)
        elif what == "reorder":
            parents = [rng.choice(seqs) for _ in seqs]
            seqs, _ = (manager.reorder(seqs, parents) for manager in managers)
    assert snapshot(caches[1]) == snapshot(caches[0])
