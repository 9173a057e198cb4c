"""The Hopper decode kernel, where one is served: whatever the reference does not exercise."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from helpers import Batch, all_specs, i32, make_batch, oracle, quant_specs, relative_error

import foscar
from foscar.cuda import decode as decode_kernel
from foscar.cuda import launch
from foscar.cuda.compiler import compile_cubin, cuda_core
from foscar.cuda.config import DecodeConfig, unsupported
from foscar.layout import HEAD_DIMS
from foscar.ops import backend

pytestmark = pytest.mark.gpu
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 3e-3}
WINDOWS = [{}, {"sink_tokens": 5, "recent_tokens": 20}, {"sink_tokens": 64, "recent_tokens": 128}]
SCHEMES = [(d, k, v) for d in HEAD_DIMS for k in quant_specs(d) for v in quant_specs(d)]


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    device = torch.device("cuda", 0)
    reason = unsupported(foscar.CacheSpec.token_wise(2, 1, 64), torch.bfloat16, torch.cuda.get_device_capability(0))
    if reason is not None:
        pytest.skip(reason)
    return device


def query_dtypes(spec: foscar.CacheSpec) -> list[torch.dtype]:
    return [dtype for dtype in BOUNDS if unsupported(spec, dtype, (9, 0)) is None]


def compile_all(calls: Iterable[tuple[foscar.CacheSpec, torch.dtype, int]]) -> None:
    """Fill the cache of cubins, for specs, dtypes and rows, on all cores: in turn they would take minutes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # workers compile side by side what their tests need; a pool for each of them would fill the memory
    configs = (DecodeConfig.choose(*call, small) for call in calls for small in (False, True))
    jobs = dict.fromkeys((config.source(), "sm_90a", config.name) for config in configs)
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(compile_cubin, jobs, chunksize=1)


def scheme_calls(spec: foscar.CacheSpec) -> list[tuple[foscar.CacheSpec, torch.dtype, int]]:
    """One call for each way to share columns among rows, each of another dtype where both are served."""
    dtypes = query_dtypes(spec)
    return [(spec, dtypes[group % len(dtypes)], group) for group in (4, 7)]


@pytest.fixture(scope="module")
def compiled_schemes(gpu: torch.device) -> None:
    specs = (foscar.CacheSpec(k, v, 2, d, **windows) for d, k, v in SCHEMES for windows in WINDOWS)
    compile_all(call for spec in specs for call in scheme_calls(spec))


def check(batch: Batch, q: torch.Tensor, **options: object) -> None:
    """Call the variant for much work, and that for little work if there is one."""
    spec = batch.cache.spec
    assert backend(spec, q.dtype, q.device)[0] == "cuda"
    for small in dict.fromkeys((False, any(DecodeConfig.choose(spec, q.dtype, rows, True).small for rows in (4, 8)))):
        out = torch.full_like(q, torch.nan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_kernel, "is_small", lambda *_, small=small: small)
            _, lse = foscar.decode_attention(q, batch.cache, **batch.tables, out=out, return_lse=True, **options)
        compare(batch, q, out, lse, **options)


def compare(batch: Batch, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **options: object) -> None:
    for b, (k, v) in enumerate(batch.dequantized()):
        want, want_lse = oracle(q[b], k, v, **options)  # type: ignore[arg-type]
        assert relative_error(out[b], want) <= BOUNDS[q.dtype]
        empty = want_lse == -torch.inf
        assert torch.equal(lse[b] == -torch.inf, empty) and (out[b][empty] == 0).all()
        # within 2**-13 of the largest value at worst of a query that integers multiply.
        assert torch.allclose(lse[b][~empty].double(), want_lse[~empty], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64])
@pytest.mark.parametrize("q_len", [1, 2, 3, 8])
@pytest.mark.parametrize("windows", WINDOWS[:2], ids=str)
def test_groups_and_query_tokens(windows: dict[str, int], q_len: int, group: int, gpu: torch.device) -> None:
    spec = foscar.CacheSpec.token_wise(2, 2, 128, v_bits=4, **windows)
    batch = make_batch(spec, [0, 1, 5, 64, 65, 1000], gpu, torch.bfloat16)
    q = torch.randn(6, q_len, 2 * group, 128, device=gpu).bfloat16()
    check(batch, q, softcap=20.0, window=300, sinks=torch.randn(2 * group, device=gpu))


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize(("head_dim", "k", "v"), SCHEMES, ids=str)
@pytest.mark.usefixtures("compiled_schemes")
def test_schemes(
    head_dim: int, k: foscar.QuantSpec, v: foscar.QuantSpec, windows: dict[str, int], gpu: torch.device
) -> None:
    for spec, dtype, group in scheme_calls(foscar.CacheSpec(k, v, 2, head_dim, **windows)):
        batch = make_batch(spec, [0, 1, 65, 1000], gpu, dtype)
        q = torch.randn(4, 1, 2 * group, head_dim, device=gpu).to(dtype)
        check(batch, q)
        check(batch, q, softcap=20.0, window=300)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("make", [foscar.CacheSpec.token_wise, foscar.CacheSpec.kivi], ids=lambda make: make.__name__)
def test_empty_sequences_alone(
    make: Callable[..., foscar.CacheSpec], windows: dict[str, int], gpu: torch.device
) -> None:
    batch = make_batch(make(2, 2, 64, **windows), [0, 0, 0], gpu, torch.bfloat16)
    check(batch, torch.randn(3, 2, 8, 64, device=gpu).bfloat16(), sinks=torch.randn(8, device=gpu))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("bits", [2, 4])
def test_channels_whose_scales_span_many_orders(bits: int, group: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """Neither q times a scale of K nor what a channel of V adds up to may leave the range of what holds it."""
    spec = foscar.CacheSpec(foscar.QuantSpec(bits, "channel"), foscar.QuantSpec(bits, "channel"), 1, 128)
    orders = 6 if dtype == torch.bfloat16 else 4  # tokens of a block that is not full yet are kept in q's dtype
    scale = torch.logspace(-orders, orders, 128, device=gpu)[torch.randperm(128, device=gpu)]
    k, v = (torch.randn(2, 650, 1, 128, device=gpu) * torch.stack([scale, scale.flip(0)])[:, None, None]).to(dtype)
    batch = make_batch(spec, [650], gpu, dtype, ([k], [v]))
    q = (torch.randn(1, 1, group, 128, device=gpu) / scale).clamp(-6e4, 6e4)
    check(batch, q.to(dtype))


def test_random_calls(gpu: torch.device) -> None:
    rng = random.Random(0)
    specs = [
        replace(spec, num_kv_heads=rng.choice([1, 2, 3, 8]), **rng.choice(WINDOWS))
        for spec in rng.sample(all_specs(1), 60)
    ]
    compile_all((spec, dtype, rows) for spec in specs for dtype in query_dtypes(spec) for rows in (4, 8))
    for _ in range(300):
        spec = rng.choice(specs)
        top = rng.choice([3, 70, 700, 6000])
        lengths = [rng.choice([0, 1, 63, 64, 65, rng.randrange(top), top]) for _ in range(rng.choice([1, 2, 5, 33]))]
        dtype = rng.choice(query_dtypes(spec))
        batch = make_batch(spec, lengths, gpu, dtype)
        group, q_len = rng.choice([1, 3, 4, 7, 8]), rng.choice([1, 1, 1, 2, 4])
        q = torch.randn(len(lengths), q_len, spec.num_kv_heads * group, spec.head_dim, device=gpu).to(dtype)
        options = {
            "softcap": rng.choice([None, 3.0]),
            "window": rng.choice([None, 0, 100]),
            "sinks": rng.choice([None, torch.randn(q.shape[2], device=gpu)]),
        }
        check(batch, q, **options)


@pytest.mark.parametrize(
    "spec",
    [
        foscar.CacheSpec.token_wise(2, 4, 128),
        foscar.CacheSpec.token_wise(4, 4, 128, **WINDOWS[2]),
        foscar.CacheSpec.kivi(2, 4, 128, **WINDOWS[1]),
    ],
    ids=str,
)
def test_graph_replayed_with_other_lengths_and_tables(spec: foscar.CacheSpec, gpu: torch.device) -> None:
    batches = [make_batch(spec, lens, gpu, torch.bfloat16) for lens in ([9000, 64, 0, 700], [3, 8000, 8999, 64])]
    batches += [replace(batch, seq_lens=batch.seq_lens // 3) for batch in batches]
    tables = {name: tensor.clone() for name, tensor in batches[0].tables.items()}
    cache = foscar.PagedKVCache(spec, batches[0].cache.pages.shape[0], gpu, torch.bfloat16, batches[0].cache.max_seqs)
    q = torch.randn(4, 1, 16, 128, device=gpu).bfloat16()
    out, stream = torch.empty_like(q), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        foscar.decode_attention(q, cache, **{**tables, "seq_lens": tables["seq_lens"] * 0}, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _, lse = foscar.decode_attention(q, cache, **tables, out=out, return_lse=True)
    for _ in range(3):
        for batch in batches:
            q.copy_(torch.randn_like(q))
            for name, tensor in batch.tables.items():
                tables[name].copy_(tensor)
            cache.pages.copy_(batch.cache.pages)
            cache.exact.copy_(batch.cache.exact)
            cache.lengths.copy_(batch.cache.lengths)
            out.fill_(torch.nan)
            graph.replay()
            compare(batch, q, out, lse)


def test_graphs_may_be_replayed_in_any_order(gpu: torch.device) -> None:
    """None of them owns the workspace that they share, whatever stream it was captured on."""
    spec = foscar.CacheSpec.token_wise(4, 2, 128)
    batches = [make_batch(spec, lens, gpu, torch.bfloat16) for lens in ([9000, 5], [20_000], [3000] * 3)]
    launch._workspaces.clear()
    captured = []
    for batch in batches:
        q = torch.randn(len(batch.k), 1, 8, 128, device=gpu).bfloat16()
        if not captured:
            with (
                pytest.raises(ValueError, match="must be outside of one"),
                torch.cuda.graph(torch.cuda.CUDAGraph()),
            ):
                foscar.decode_attention(q, batch.cache, **batch.tables)
            foscar.decode_attention(q, batch.cache, **batch.tables)
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
        with torch.cuda.graph(graph):
            _, lse = foscar.decode_attention(q, batch.cache, **batch.tables, out=out, return_lse=True)
        captured.append((batch, q, graph, out, lse))
    for batch, q, graph, out, lse in [*captured[::-1], *captured]:
        out.fill_(torch.nan)
        graph.replay()
        compare(batch, q, out, lse)


@pytest.mark.parametrize("captured", [False, True])
def test_lengths_that_the_launch_before_has_just_changed(captured: bool, gpu: torch.device) -> None:
    """Lengths as they are now count: torch's kernel, which changes them, lets nothing begin before it is done."""
    batch = make_batch(foscar.CacheSpec.token_wise(2, 2, 128), [700, 9000, 64, 1000], gpu, torch.bfloat16)
    lengths = i32([[700, 9000, 64, 1000], [1, 0, 63, 999], [0, 8000, 0, 0], [0, 0, 0, 0]], gpu)
    q = torch.randn(4, 1, 8, 128, device=gpu).bfloat16()
    tables, now = batch.tables, lengths[0].clone()
    wanted = []
    for row in lengths:
        torch.cuda.synchronize()
        wanted.append(foscar.decode_attention(q, batch.cache, **{**tables, "seq_lens": row}))
    outs = torch.full((60, *q.shape), torch.nan, device=gpu, dtype=q.dtype)

    def attend() -> None:
        for i, out in enumerate(outs):
            torch.add(lengths[i * 7 // 2 % 4], 0, out=now)  # a kernel, unlike a copy
            foscar.decode_attention(q, batch.cache, **{**tables, "seq_lens": now}, out=out)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        graph.replay()
        outs.fill_(torch.nan)
        graph.replay()
    else:
        attend()
    for i, out in enumerate(outs):
        assert torch.equal(out, wanted[i * 7 // 2 % 4])


_CHANGE = """
extern "C" __global__ void change(int* lengths, const int* others) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 100; ++i) __nanosleep(1000);
  lengths[threadIdx.x] = others[threadIdx.x];
}
"""


@pytest.mark.parametrize("others", [[1, 9000, 63, 0], [9000, 9000, 9000, 9000], [0, 0, 0, 0], [700, 9000, 64, 999]])
def test_lengths_that_change_after_they_were_read(others: list[int], gpu: torch.device) -> None:
    """A kernel that lets the next launch begin, and changes lengths long after."""
    from cuda.bindings import driver

    library = cuda_core().ObjectCode.from_cubin(compile_cubin(_CHANGE, "sm_90a", "change"))
    change = driver.CUfunction(int(library.get_kernel("change").handle))
    batch = make_batch(foscar.CacheSpec.token_wise(2, 2, 128), [9000] * 4, gpu, torch.bfloat16)
    before, after = i32([700, 9000, 64, 1000], gpu), i32(others, gpu)
    q, now = torch.randn(4, 1, 8, 128, device=gpu).bfloat16(), before.clone()
    out, want = (torch.full_like(q, torch.nan) for _ in range(2))
    tables = {**batch.tables, "seq_lens": now}
    foscar.decode_attention(q, batch.cache, **{**tables, "seq_lens": after}, out=want)
    pointers = (ctypes.c_void_p * 2)(now.data_ptr(), after.data_ptr())
    parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(pointers) + 8 * i for i in range(2)))
    stream = torch.cuda.current_stream(gpu).cuda_stream
    for _ in range(3):
        now.copy_(before)
        torch.cuda.synchronize()
        shape = (1, 1, 1, 4, 1, 1)
        (result,) = driver.cuLaunchKernel(change, *shape, 0, stream, ctypes.addressof(parameters), 0)
        assert int(result) == 0
        foscar.decode_attention(q, batch.cache, **tables, out=out)
        assert torch.equal(out, want)
        out.fill_(torch.nan)


def test_two_streams_and_two_caches(gpu: torch.device) -> None:
    spec = foscar.CacheSpec.token_wise(4, 2, 64)
    batches = [make_batch(spec, [20_000, 3, 777], gpu, torch.bfloat16) for _ in range(2)]
    q = torch.randn(3, 1, 8, 64, device=gpu).half()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[list[torch.Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(foscar.decode_attention(q, batches[i].cache, **batches[i].tables))
    torch.cuda.synchronize()
    for i, outs in enumerate(results):
        want = foscar.decode_attention(q, batches[i].cache, **batches[i].tables)
        for b, (k, v) in enumerate(batches[i].dequantized()):
            assert relative_error(want[b], oracle(q[b], k, v)[0]) <= 1e-3
        assert all(torch.allclose(out, want, atol=2e-3) for out in outs)


def test_pages_beyond_4_gib(gpu: torch.device) -> None:
    spec = foscar.CacheSpec.token_wise(4, 8, 128)
    num_pages = (5 << 30) // (8 * spec.record_bytes)
    cache = foscar.PagedKVCache(spec, num_pages, gpu)
    cache.pages.fill_(0xFF)
    table = torch.tensor([[num_pages - 1, 0, num_pages - 2], [num_pages // 2, num_pages - 3, 1]], dtype=torch.int32)
    kv = torch.randn(2, 300, 8, 128, device=gpu).bfloat16()
    foscar.append(cache, kv[0], kv[1], table.to(gpu), i32([0, 0], gpu), i32([0, 170, 300], gpu))
    batch = Batch(cache, table.to(gpu), i32([170, 130], gpu), i32([0, 1], gpu), [], [])
    check(batch, torch.randn(2, 1, 32, 128, device=gpu).bfloat16())


@pytest.mark.parametrize("batch_size", [257, 1024])
def test_many_sequences(batch_size: int, gpu: torch.device) -> None:
    lengths = [i * 37 % 131 for i in range(batch_size)]
    batch = make_batch(foscar.CacheSpec.token_wise(2, 2, 64), lengths, gpu, torch.bfloat16)
    check(batch, torch.randn(batch_size, 1, 8, 64, device=gpu).bfloat16())


@pytest.mark.parametrize("length", [15_000, 70_000])
@pytest.mark.parametrize("group", [3, 8])
def test_one_long_sequence(group: int, length: int, gpu: torch.device) -> None:
    """Its parts come from 30 CTAs, or from all; the workspace is left as the next call needs it."""
    batch = make_batch(foscar.CacheSpec.token_wise(2, 1, 128), [length], gpu, torch.bfloat16)
    for _ in range(3):
        check(batch, torch.randn(1, 1, group, 128, device=gpu).bfloat16())


def test_nothing_is_written_beside_the_output(gpu: torch.device) -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(2, 3, 128), [5000, 64, 0], gpu, torch.bfloat16)
    q = torch.randn(3, 2, 15, 128, device=gpu).bfloat16()
    room = torch.full((5, 4, 17, 160), 7.0, device=gpu, dtype=torch.bfloat16)
    out = room[1:4, 1:3, 1:16, 16:144]
    _, lse = foscar.decode_attention(q, batch.cache, **batch.tables, out=out, return_lse=True)
    compare(batch, q, out, lse)
    untouched = torch.ones_like(room, dtype=torch.bool)
    untouched[1:4, 1:3, 1:16, 16:144] = False
    assert (room[untouched] == 7).all()


def test_unaligned_queries(gpu: torch.device) -> None:
    batch = make_batch(foscar.CacheSpec.token_wise(4, 2, 64), [500], gpu, torch.bfloat16)
    room = torch.randn(1, 1, 8, 67, device=gpu).bfloat16()
    check(batch, room[..., 3:])
