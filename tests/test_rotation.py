"""Rotated caches: attention is that to tokens that are not rotated, up to quantisation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import i32, make_batch, oracle, relative_error

import foscar
from foscar.layout import HEAD_DIMS
from foscar.rotation import hadamard

HADAMARD = foscar.QuantSpec(4, hadamard=True)
WINDOWS: list[dict[str, int]] = [{}, {"sink_tokens": 5, "recent_tokens": 20}]


def orthogonal(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hadamard(head_dim: int) -> None:
    matrix, block = hadamard(head_dim), head_dim & -head_dim
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim), atol=1e-5) and torch.equal(matrix, matrix.T)
    for i, j in ((0, 0), (3, 5), (31, 17), (head_dim - 1, head_dim - 1), (head_dim - 1, 0), (2, head_dim - 2)):
        sign = (-1) ** (i % block & j % block).bit_count() if i // block == j // block else 0
        assert matrix[i, j].item() == pytest.approx(sign * block**-0.5)


def test_hadamard_of_no_head_dim() -> None:
    with pytest.raises(ValueError, match="head_dim=80: must be one of"):
        hadamard(80)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("kind", ["hadamard", "matrix"])
def test_attention(kind: str, windows: dict[str, int], device: torch.device) -> None:
    quant = foscar.QuantSpec(4, hadamard=kind == "hadamard")
    spec = foscar.CacheSpec(quant, quant, 2, 128, **windows)
    rotations = () if kind == "hadamard" else (orthogonal(128).to(device).bfloat16(), orthogonal(128).to(device))
    lengths, dtype = [0, 1, 65, 300], torch.bfloat16
    batch = make_batch(spec, lengths, device, dtype, rotations=rotations)
    q = torch.randn(4, 2, 8, 128, device=device).to(dtype)
    room = torch.full((4, 2, 9, 130), 7.0, device=device, dtype=dtype)
    out = room[:, :, :8, :128]
    _, lse = foscar.decode_attention(q, batch.cache, **batch.tables, return_lse=True, out=out)
    assert (room[:, :, 8:] == 7).all() and (room[..., 128:] == 7).all()
    assert torch.allclose(out, foscar.decode_attention(q, batch.cache, **batch.tables), 0.02, 0.01)
    assert torch.allclose(out[:, 1], foscar.decode_attention(q[:, 1], batch.cache, **batch.tables), 0.02, 0.01)
    for b, (k, v) in enumerate(batch.dequantized()):
        # What is read back is near what was appended.
        assert relative_error(k, batch.k[b]) <= 0.15 and relative_error(v, batch.v[b]) <= 0.15
        want, want_lse = oracle(q[b], k, v)
        assert relative_error(out[b], want) <= 6e-3
        seen = want_lse > -torch.inf
        assert torch.allclose(lse[b][seen].double(), want_lse[seen], atol=2e-2)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_extend(windows: dict[str, int], device: torch.device) -> None:
    """A row of a chunk is the row that decoding gives, the new token's own rounding aside."""
    spec = foscar.CacheSpec(HADAMARD, foscar.QuantSpec(4), 2, 64, **windows)
    dtype, matrix = torch.bfloat16, orthogonal(64).to(device).bfloat16()
    batch = make_batch(spec, [130, 64], device, dtype, rotations=(None, matrix))
    q, (k, v) = torch.randn(9, 4, 64, device=device).to(dtype), torch.randn(2, 9, 2, 64, device=device).to(dtype)
    ends = i32([0, 5, 9], device)
    out = foscar.extend_attention(q, k, v, batch.cache, cu_seqlens=ends, **batch.tables)
    for b, (k_hat, v_hat) in enumerate(batch.dequantized()):
        rows = slice(*ends[b : b + 2].tolist())
        want, _ = oracle(q[rows], torch.cat([k_hat, k[rows].float()]), torch.cat([v_hat, v[rows].float()]))
        assert relative_error(out[rows], want) <= 1e-2


def test_outlier_channels(device: torch.device) -> None:
    """What rotations are for."""
    errors = []
    for quant in (foscar.QuantSpec(2), foscar.QuantSpec(2, hadamard=True)):
        torch.manual_seed(0)
        k = torch.randn(300, 1, 128, device=device)
        k[..., 17] *= 30
        batch = make_batch(foscar.CacheSpec(quant, quant, 1, 128), [300], device, kv=([k], [k]))
        errors.append(relative_error(batch.dequantized()[0][0], k))
    assert errors[1] < 0.8 * errors[0]


def test_rotations_are_kept_in_files(tmp_path: Path) -> None:
    spec = foscar.CacheSpec(HADAMARD, foscar.QuantSpec(4), 2, 64, recent_tokens=9)
    matrix = orthogonal(64)
    batch = make_batch(spec, [100], rotations=(None, matrix))
    batch.cache.save(tmp_path / "cache.safetensors")
    loaded = foscar.PagedKVCache.load(tmp_path / "cache.safetensors", spec)
    assert loaded.v_rotation is not None and torch.equal(loaded.v_rotation, matrix)
    q = torch.randn(1, 2, 64)
    want = foscar.decode_attention(q, batch.cache, **batch.tables)
    assert torch.equal(foscar.decode_attention(q, loaded, **batch.tables), want)
    plain = foscar.CacheSpec.token_wise(4, 2, 64, recent_tokens=9)
    with pytest.raises(ValueError, match="must be that of the file"):
        foscar.PagedKVCache.load(tmp_path / "cache.safetensors", plain)


@pytest.mark.parametrize(
    ("quant", "matrix", "message"),
    [
        (foscar.QuantSpec(2), torch.ones(64, 64), "k_rotation=.*must be orthogonal"),
        (foscar.QuantSpec(2), torch.full((64, 64), torch.nan), "must be orthogonal"),
        (foscar.QuantSpec(2), torch.eye(128), r"k_rotation.shape=\[128, 128\]: must be \[64, 64\]"),
        (foscar.QuantSpec(2), torch.eye(64, dtype=torch.int32), "k_rotation.dtype"),
        (foscar.QuantSpec(2), "hadamard", "k_rotation='str': must be a torch.Tensor"),
        (HADAMARD, torch.eye(64), "k_rotation=.*must be None where the spec has a Hadamard transform"),
    ],
)
def test_matrices_that_are_refused(quant: foscar.QuantSpec, matrix: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        foscar.PagedKVCache(foscar.CacheSpec(quant, quant, 1, 64), 1, k_rotation=matrix)


def test_what_leaves_the_range_is_refused() -> None:
    """Sums of large values; the cache is as it was."""
    spec = foscar.CacheSpec(HADAMARD, HADAMARD, 1, 64)
    cache = foscar.PagedKVCache(spec, 1)
    large = torch.full((1, 1, 64), 3e38)
    with pytest.raises(ValueError, match=r"k, rotated,\[0, 0, 0\]=inf: must be finite"):
        foscar.append(cache, large, large, i32([[0]]), i32([0]), i32([0, 1]))
    assert (cache.pages == 0).all()
