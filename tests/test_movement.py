"""Pages and whole caches that go elsewhere and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import i32, make_batch, snapshot
from safetensors.torch import save_file

import foscar

T, K = foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi
SPECS = [T(2, 2, 64), K(4, 2, 64, sink_tokens=4, recent_tokens=30)]


@pytest.mark.parametrize("given", [False, True])
def test_pages_to_the_host_and_back(given: bool, device: torch.device) -> None:
    batch = make_batch(T(2, 2, 64), [300, 200], device)
    cache, ids = batch.cache, batch.block_table[0, :5]
    room = torch.full((5, 2, cache.spec.record_bytes), 7, dtype=torch.uint8) if given else None
    records = cache.save_pages(ids, room)
    assert records.device.type == "cpu" and records.is_pinned() == (device.type == "cuda" and not given)
    assert room is None or records.data_ptr() == room.data_ptr()
    other = foscar.PagedKVCache(cache.spec, 9, device)
    table = i32([[8, 0, 3, 7, 1]], device)
    other.load_pages(records, table[0])
    want = batch.dequantized()[0]
    got = foscar.dequantize(other, table, i32([300], device))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert (other.pages[[2, 4, 5, 6]] == 0).all()
    other.load_pages(records.to(device)[:1], table[0, 4:])
    assert torch.equal(other.pages[1], other.pages[8])
    assert cache.save_pages(ids[:0]).shape == (0, 2, cache.spec.record_bytes)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_file_and_back(spec: foscar.CacheSpec, device: torch.device, tmp_path: Path) -> None:
    batch = make_batch(spec, [300, 0, 77], device, torch.bfloat16)
    batch.cache.save(tmp_path / "cache.safetensors")
    cache = foscar.PagedKVCache.load(tmp_path / "cache.safetensors", spec, device)
    assert snapshot(cache) == snapshot(batch.cache) and cache.spec == spec and cache.max_seqs == batch.cache.max_seqs
    assert cache.device == device and cache.exact.dtype == batch.cache.exact.dtype
    if spec.exact_tokens:  # whose rows are named, as they were
        with pytest.raises(ValueError, match="seq_ids=None: must be given"):
            foscar.dequantize(cache, batch.block_table, batch.seq_lens)
    # It goes on as the first one does.
    k, v = torch.randn(2, 150, 2, 64, device=device).bfloat16()
    table = torch.arange(21, dtype=torch.int32, device=device).view(3, 7)
    for c in (cache, batch.cache):
        ends = i32([0, 50, 100, 150], device)
        c.lengths.fill_(0)
        foscar.append(c, k, v, table % len(c.pages), i32([0, 0, 0], device), ends, seq_ids=batch.seq_ids)
    assert snapshot(cache) == snapshot(batch.cache)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    foscar.PagedKVCache(T(2, 2, 64), 3).save(path)
    with pytest.raises(ValueError, match=r"spec='k4t64-v4t64-h2-d64-s0-r0': must be that of the file, k2t64-v2t64-h2"):
        foscar.PagedKVCache.load(path, T(4, 2, 64))
    tensors = {"pages": torch.zeros(1)}
    save_file(tensors, path, {"foscar": "0", "spec": "k2t64-v2t64-h2-d64-s0-r0", "max_seqs": "64"})
    with pytest.raises(ValueError, match="format version='0': must be 1, the one that this version"):
        foscar.PagedKVCache.load(path)
    known = {"foscar": "1", "spec": "k2t64-v2t64-h2-d64-s0-r4", "max_seqs": "3", "seq_ids": "unknown"}
    good = foscar.PagedKVCache(foscar.CacheSpec.parse(known["spec"]), 2, dtype=torch.float32, max_seqs=3)
    fine = {"pages": good.pages, "exact": good.exact, "lengths": good.lengths}
    for name in fine:
        save_file({**fine, name: torch.zeros(1, dtype=fine[name].dtype)}, path, known)
        with pytest.raises(ValueError, match=rf"{name}.shape=\[1\]"):
            foscar.PagedKVCache.load(path)
    for metadata in (None, {"foscar": "1"}):
        save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=r"must be a file that PagedKVCache\.save wrote"):
            foscar.PagedKVCache.load(path)
    path.write_text("not a file of tensors")
    with pytest.raises(ValueError, match="must be a safetensors file"):
        foscar.PagedKVCache.load(path)
    with pytest.raises(FileNotFoundError):
        foscar.PagedKVCache.load(tmp_path / "none")


def test_arguments_that_do_not_fit() -> None:
    cache = foscar.PagedKVCache(T(2, 2, 64), 3)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"pages.dtype=torch.int64"):
        cache.save_pages(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"out.shape=\[2, 2, 2560\]: must be \[1, 2, 2560\]"):
        cache.save_pages(i32([0]), torch.zeros(2, 2, 2560, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"out.stride\(\)="):
        cache.save_pages(i32([0]), torch.zeros(1, 2560, 2, dtype=torch.uint8).mT)
    with pytest.raises(ValueError, match=r"records.shape=\[1, 2, 9\]"):
        cache.load_pages(torch.zeros(1, 2, 9, dtype=torch.uint8), i32([0]))
    with pytest.raises(ValueError, match=r"records='int': must be a torch.Tensor"):
        cache.load_pages(3, i32([0]))  # type: ignore[arg-type]
    records = torch.ones(2, 2, 2560, dtype=torch.uint8)
    assert torch.equal(cache.save_pages(i32([1, 1])), cache.save_pages(i32([1])).expand(2, -1, -1))
    for ids, message in ([0, -1], r"pages\[1\]=-1: must be in \[0, 3\)"), ([3, 0], r"pages\[0\]=3"):
        with pytest.raises(ValueError, match=message):
            cache.save_pages(i32(ids))
        with pytest.raises(ValueError, match=message):
            cache.load_pages(records, i32(ids))
    with pytest.raises(ValueError, match=r"pages=\[1, 1\]: must be distinct"):
        cache.load_pages(records, i32([1, 1]))
    assert snapshot(cache) == before


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_beams(spec: foscar.CacheSpec, device: torch.device) -> None:
    """Beam search as a list of tokens of each beam would have it."""
    manager = foscar.BlockManager(foscar.PagedKVCache(spec, 40, device, torch.float32, max_seqs=4))
    k = torch.randn(1, 70, 2, 64, device=device)
    first = manager.new()
    manager.append([first], k[0], k[0])
    beams, history = manager.reorder([first], [first] * 4), [k[0]] * 4
    assert beams[0] == first and len(set(beams)) == 4
    for parents in ([0, 0, 1, 3], [2, 2, 2, 2], [3, 1, 0, 2]):
        new = torch.randn(4, 40, 2, 64, device=device)
        manager.append(beams, new.flatten(0, 1), new.flatten(0, 1))
        history = [torch.cat(pair) for pair in zip(history, new, strict=True)]
        beams = manager.reorder(beams, [beams[i] for i in parents])
        history = [history[i] for i in parents]
    got = foscar.dequantize(manager.cache, **manager.tables(beams))[0]
    want = [make_batch(spec, [len(x)], device, kv=([x], [x])).dequantized()[0][0] for x in history]
    assert torch.equal(got, torch.cat(want))
    beams = manager.reorder(beams, [])
    assert beams == [] and manager.free_pages == 40


def test_beams_that_do_not_fit() -> None:
    manager = foscar.BlockManager(foscar.PagedKVCache(SPECS[1], 4, max_seqs=2))
    a, b = manager.new(), manager.new()
    with pytest.raises(ValueError, match=r"parents=7: must be one of \[0, 1\]"):
        manager.reorder([a, b], [a, 7])
    with pytest.raises(ValueError, match=r"seq_ids=\[0, 0\]: must be distinct"):
        manager.reorder([a, a], [a])
    with pytest.raises(foscar.OutOfPagesError, match="max_seqs=2: 2 rows are needed, 1 are free"):
        manager.reorder([a, b], [a, a, a])
    assert manager.length(b) == 0 and manager.reorder([b, a], [b, b]) == [b, a]
