"""Long random histories of `BlockManager`, without any tokens: who has which page, and what is quantised when.

``python tests/test_bookkeeping.py STEPS`` runs as many steps as it is told, on all recipes.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

import pytest
import torch

import foscar
from foscar import sequences
from foscar.layout import PAGE_SIZE

T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi
SPECS = [
    T(2, 1, 64),
    T(2, 1, 64, sink_tokens=3),
    T(2, 1, 64, recent_tokens=5),
    T(2, 1, 64, sink_tokens=70, recent_tokens=130),
    K(2, 1, 64),
    K(2, 1, 64, sink_tokens=64, recent_tokens=30),
    K(2, 1, 64, sink_tokens=70, recent_tokens=1),
]


@dataclass
class Model:
    """What a sequence should be."""

    length: int = 0
    # Where each quantised token was written, by the step that did it.
    quantized: dict[int, int] = field(default_factory=dict)


class History:
    """A manager of few pages, and what it should hold."""

    def __init__(self, spec: foscar.CacheSpec, seed: int) -> None:
        self.rng = random.Random(seed)
        self.spec = spec
        self.manager = foscar.BlockManager(foscar.PagedKVCache(spec, 24, max_seqs=6))
        self.models: dict[int, Model] = {}
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        choices = [
            self.append,
            self.append,
            self.append,
            self.append,
            self.truncate,
            self.fork,
            self.free,
            self.reorder,
        ]
        self.rng.choice(choices)()
        self.check()

    def pick(self) -> int | None:
        return self.rng.choice(list(self.models)) if self.models else None

    def append(self) -> None:
        if not self.models or (len(self.models) < 3 and self.rng.random() < 0.2):
            self.new()
        chosen = self.rng.sample(list(self.models), self.rng.randint(1, min(3, len(self.models))))
        counts = [self.rng.choice([0, 1, 1, 1, 2, 63, 64, 65, self.rng.randrange(200)]) for _ in chosen]
        before = {seq: self.pages_of(seq) for seq in self.models}
        tokens = torch.empty(sum(counts), 1, 64, device="meta")
        try:
            self.manager.append(chosen, tokens, tokens, counts)
        except foscar.OutOfPagesError:
            assert {seq: self.pages_of(seq) for seq in self.models} == before
            return
        for seq, count in zip(chosen, counts, strict=True):
            model = self.models[seq]
            model.length += count
            if not count:
                continue
            border = model.length - self.spec.recent_tokens
            border = border // PAGE_SIZE * PAGE_SIZE if self.spec.block_wise else border
            for position in range(self.spec.sink_tokens, border):
                if position not in model.quantized:  # exactly once, and never again while it is there
                    model.quantized[position] = self.steps

    def new(self) -> None:
        try:
            self.models[self.manager.new()] = Model()
        except foscar.OutOfPagesError:
            assert self.spec.exact_tokens and len(self.models) == 6

    def fork(self) -> None:
        seq = self.pick()
        if seq is not None and len(self.models) < 6:
            model = self.models[seq]
            self.models[self.manager.fork(seq)] = Model(model.length, dict(model.quantized))

    def free(self) -> None:
        seq = self.pick()
        if seq is not None:
            self.manager.free(seq)
            del self.models[seq]

    def reorder(self) -> None:
        seqs = list(self.models)
        if seqs:
            parents = [self.rng.choice(seqs) for _ in seqs]
            now = self.manager.reorder(seqs, parents)
            models = [self.models[parent] for parent in parents]
            self.models = {s: Model(m.length, dict(m.quantized)) for s, m in zip(now, models, strict=True)}

    def truncate(self) -> None:
        seq = self.pick()
        if seq is None:
            return
        model = self.models[seq]
        length = self.rng.choice([model.length, max(model.length - self.rng.randrange(9), 0), 0])
        try:
            self.manager.truncate(seq, length)
        except ValueError:
            assert self.spec.block_wise and length % PAGE_SIZE and length in model.quantized
            return
        model.length = length
        model.quantized = {position: step for position, step in model.quantized.items() if position < length}

    def pages_of(self, seq: int) -> list[int]:
        return list(self.manager._entry(seq).pages)

    def check(self) -> None:
        users: dict[int, int] = {}
        for seq, model in self.models.items():
            entry = self.manager._entry(seq)
            assert self.manager.length(seq) == model.length
            # What is quantised is one run, from the sinks to the border, and each such token has a page.
            border = max(entry.quantized, self.spec.sink_tokens)
            assert list(model.quantized) == list(range(self.spec.sink_tokens, border))
            assert model.length - border <= self.spec.ring_tokens
            columns = {position // PAGE_SIZE for position in model.quantized}
            assert {i for i, page in enumerate(entry.pages) if page >= 0} == columns
            for page in entry.pages:
                if page >= 0:
                    users[page] = users.get(page, 0) + 1
        assert self.manager.free_pages == 24 - len(users)
        assert self.manager._users == [users.get(page, 0) for page in range(24)]
        assert not users.keys() & set(self.manager._free_pages)


def written_columns(spec: foscar.CacheSpec, steps: int, seed: int, patch: pytest.MonkeyPatch) -> None:
    """Run a history whose appends write nothing, but must own what they would write."""
    history = History(spec, seed)

    def append(*_: object, cu_seqlens: torch.Tensor, **tables: torch.Tensor) -> None:
        ends, owners = cu_seqlens.tolist(), history.manager._users
        rows = zip(tables["seq_ids"].tolist(), tables["block_table"].tolist(), ends, ends[1:], strict=False)
        for seq, row, begin, end in rows:
            entry = history.manager._entry(seq)
            if end > begin:
                border = spec.quantized_len(entry.length + end - begin, entry.quantized)
                for position in range(max(entry.quantized, spec.sink_tokens), border):
                    assert owners[row[position // PAGE_SIZE]] == 1, "a shared page would be written"

    patch.setattr(sequences, "append", append)
    patch.setattr(foscar.PagedKVCache, "copy_pages", lambda *_: None)
    patch.setattr(foscar.PagedKVCache, "copy_exact", lambda *_: None)
    for _ in range(steps):
        history.step()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_long_histories(spec: foscar.CacheSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    written_columns(spec, 5_000, 0, monkeypatch)


if __name__ == "__main__":
    total = int(sys.argv[1])
    for number, each in enumerate(SPECS):
        with pytest.MonkeyPatch.context() as context:
            written_columns(each, total // len(SPECS), number, context)
        sys.stdout.write(f"{each}: {total // len(SPECS)} steps\n")
