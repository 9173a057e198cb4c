"""Decode a real model's attention from BF16, 4-bit and 2-bit caches, and compare error and memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from safetensors import SafetensorError, safe_open

from foscar._checks import require
from foscar._version import __version__
from foscar.attention import decode_attention
from foscar.cache import PagedKVCache, dequantize
from foscar.layout import PAGE_SIZE, CacheSpec
from foscar.sequences import BlockManager

SINK_TOKENS, RECENT_TOKENS = 64, 128


@dataclass(frozen=True)
class Layer:
    """Captured activations of one layer, after rotary embedding.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[tokens, num_kv_heads, head_dim]``.
    q : torch.Tensor
        ``[steps, num_q_heads, head_dim]``: queries of the last `steps` tokens.
    sm_scale : float
        Factor of the scores.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    sm_scale: float


@dataclass(frozen=True)
class Recipe:
    """What one way to store the cache costs, and what it gets wrong.

    Attributes
    ----------
    name : str
        What the recipe is called.
    k_bits, v_bits : int
        Bits of a stored element.
    bits_per_element : float
        Bits that an element of K or V takes in memory, with parameters and windows.
    bytes_per_token : float
        Bytes that a token takes, all captured heads and layers together.
    compression : float
        bytes_per_token of BF16 over that of the recipe.
    output_error : float
        ``|out - exact| / |exact|`` over all decoded tokens; `exact` is float64 attention over the captured K and V.
    top_mass_kept : float
        How much is left of the probability of each query's most attended token, at most 1; the mean over queries.
    seconds : float
        Time spent in attention, all decoded tokens and layers together.
    """

    name: str
    k_bits: int
    v_bits: int
    bits_per_element: float
    bytes_per_token: float
    compression: float
    output_error: float
    top_mass_kept: float
    seconds: float


@dataclass
class _Exact:
    """Exact attention of a layer's decoded tokens."""

    out: torch.Tensor  # [steps, num_q_heads, head_dim], float64
    top: torch.Tensor  # [steps, num_q_heads], the most attended token
    top_p: torch.Tensor  # [steps, num_q_heads], its probability


@dataclass
class _Decoded:
    """A recipe's attention of a layer's decoded tokens."""

    out: torch.Tensor  # [steps, num_q_heads, head_dim]
    top_p: torch.Tensor  # [steps, num_q_heads], the probability it gives to the most attended token
    seconds: float
    nbytes: int


def load_activations(path: Path | None = None, steps: int = 32) -> list[Layer]:
    """Read layers from a safetensors file, by default the slice of SmolLM2-135M-Instruct that foscar ships.

    Parameters
    ----------
    path : Path, optional
        A file with ``layer<i>.k``, ``layer<i>.v`` and ``layer<i>.q`` for any i, shaped as in `Layer`, and optionally
        ``sm_scale`` in its metadata.
    steps : int
        Tokens to decode, at most: the last ones of q.

    Raises
    ------
    ValueError
        If a tensor is missing or shapes do not fit.
    """
    file = str(resources.files("foscar") / "data" / "smollm2_slice.safetensors" if path is None else path)
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"activations={file!r}: must be a safetensors file ({error})") from error
    with opened as tensors:
        names = set(tensors.keys())
        indices = sorted(int(m[1]) for name in names if (m := re.fullmatch(r"layer(\d+)\.k", name)))
        require(len(indices) > 0, "activations", file, "must hold tensors layer<i>.k, layer<i>.v and layer<i>.q")
        scale = (tensors.metadata() or {}).get("sm_scale")
        layers = []
        for i in indices:
            missing = {f"layer{i}.{x}" for x in "kvq"} - names
            require(not missing, "activations", file, f"must hold {sorted(missing)}")
            k, v, q = (tensors.get_tensor(f"layer{i}.{x}") for x in "kvq")
            fits = k.dim() == q.dim() == 3 and k.shape == v.shape and k.shape[2] == q.shape[2]
            fits = fits and len(q) < len(k) and q.shape[1] % k.shape[1] == 0
            rule = "must be [tokens, num_kv_heads, head_dim], q with fewer tokens and a multiple of the heads"
            require(fits, f"layer{i}", [list(x.shape) for x in (k, v, q)], rule)
            layers.append(Layer(k, v, q[-steps:], float(scale or k.shape[2] ** -0.5)))
    return layers


def specs(num_kv_heads: int, head_dim: int) -> dict[str, CacheSpec]:
    """Return the quantised recipes: INT4 and INT2, each in three ways."""
    windows = {"sink_tokens": SINK_TOKENS, "recent_tokens": RECENT_TOKENS}
    return {
        f"INT{bits} {name}": make(bits, num_kv_heads, head_dim, **keep)
        for bits in (4, 2)
        for name, make, keep in (
            ("token-wise", CacheSpec.token_wise, {}),
            ("channel-wise K", CacheSpec.kivi, {}),
            ("channel-wise K + windows", CacheSpec.kivi, windows),
        )
    }


def run(layers: list[Layer], advance: Callable[[str], None] = lambda name: None) -> list[Recipe]:
    """Decode the last tokens of each layer with every recipe.

    Parameters
    ----------
    layers : list of Layer
        Activations; recipes are built for the shape of each.
    advance : callable
        Called with a recipe's name before each of its layers, ``(len(specs) + 1) * len(layers)`` times in all.
    """
    exact = [_attend_exactly(layer) for layer in layers]
    elements = sum(2 * layer.k.numel() for layer in layers)
    recipes: list[Recipe] = []
    for name in ("BF16", *specs(1, 64)):
        decoded, bits = [], (16, 16)
        for layer, want in zip(layers, exact, strict=True):
            advance(name)
            if name == "BF16":
                decoded.append(_decode_bf16(layer, want))
            else:
                spec = specs(layer.k.shape[1], layer.k.shape[2])[name]
                decoded.append(_decode(layer, want, spec))
                bits = (spec.k.bits, spec.v.bits)
        nbytes = sum(got.nbytes for got in decoded)
        per_token = sum(got.nbytes / len(layer.k) for got, layer in zip(decoded, layers, strict=True))
        pairs = list(zip(decoded, exact, strict=True))
        wrong = sum((got.out.double() - want.out).square().sum().item() for got, want in pairs)
        whole = sum(want.out.square().sum().item() for want in exact)
        kept = torch.cat([(got.top_p / want.top_p).clamp(max=1).flatten() for got, want in pairs])
        recipes.append(
            Recipe(
                name,
                *bits,
                bits_per_element=nbytes * 8 / elements,
                bytes_per_token=per_token,
                compression=16 * elements / 8 / nbytes,
                output_error=(wrong / whole) ** 0.5,
                top_mass_kept=kept.mean().item(),
                seconds=sum(got.seconds for got in decoded),
            )
        )
    return recipes


def _steps(layer: Layer) -> list[tuple[int, torch.Tensor]]:
    """Each decoded token's length of context, itself included, and its query."""
    return list(enumerate(layer.q, len(layer.k) - len(layer.q) + 1))


def _attend_exactly(layer: Layer) -> _Exact:
    group = layer.q.shape[1] // layer.k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (layer.k, layer.v))
    outs, tops, top_ps = [], [], []
    for length, q in _steps(layer):
        p = torch.softmax(torch.einsum("hd,thd->ht", q.double(), k[:length]) * layer.sm_scale, -1)
        top_p, top = p.max(-1)
        outs.append(torch.einsum("ht,thd->hd", p, v[:length]))
        tops.append(top)
        top_ps.append(top_p)
    return _Exact(torch.stack(outs), torch.stack(tops), torch.stack(top_ps))


def _decode_bf16(layer: Layer, exact: _Exact) -> _Decoded:
    """PyTorch's own attention over an unquantised cache."""
    k, v = (x.bfloat16().transpose(0, 1).contiguous() for x in (layer.k, layer.v))
    group = layer.q.shape[1] // layer.k.shape[1]
    outs, top_ps, seconds = [], [], 0.0
    for (length, q), top in zip(_steps(layer), exact.top, strict=True):
        start = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(
            q.bfloat16()[:, None], k[:, :length], v[:, :length], scale=layer.sm_scale, enable_gqa=True
        )
        seconds += time.perf_counter() - start
        outs.append(out[:, 0])
        keys = k[:, :length].repeat_interleave(group, 0).double()
        p = torch.softmax(torch.einsum("hd,htd->ht", q.double(), keys) * layer.sm_scale, -1)
        top_ps.append(p.gather(1, top[:, None])[:, 0])
    return _Decoded(torch.stack(outs), torch.stack(top_ps), seconds, k.nbytes + v.nbytes)


def _decode(layer: Layer, exact: _Exact, spec: CacheSpec) -> _Decoded:
    """Append the prompt, then append and attend token by token, as a model does."""
    cache = PagedKVCache(spec, num_pages=-(-len(layer.k) // PAGE_SIZE), max_seqs=1)
    manager = BlockManager(cache)
    seq = manager.new()
    prompt = len(layer.k) - len(layer.q)
    manager.append([seq], layer.k[:prompt], layer.v[:prompt])
    outs, lses, seconds = [], [], 0.0
    for length, q in _steps(layer):
        manager.append([seq], layer.k[length - 1 : length], layer.v[length - 1 : length])
        tables = manager.tables([seq])
        start = time.perf_counter()
        out, lse = decode_attention(q[None], cache, **tables, sm_scale=layer.sm_scale, return_lse=True)
        seconds += time.perf_counter() - start
        outs.append(out[0])
        lses.append(lse[0])
    k_hat, _ = dequantize(cache, **manager.tables([seq]))
    # A token is quantised once, so its key is either what it is at the end or, while in the window, the exact one.
    quantized = torch.tensor([spec.quantized_len(n) for n, _ in _steps(layer)])[:, None]
    in_window = (exact.top < spec.sink_tokens) | (exact.top >= quantized)
    head = torch.arange(layer.q.shape[1]) // (layer.q.shape[1] // layer.k.shape[1])
    key = torch.where(in_window[..., None], layer.k[exact.top, head].double(), k_hat[exact.top, head].double())
    scores = (layer.q.double() * key).sum(-1) * layer.sm_scale
    top_p = torch.exp(scores - torch.stack(lses))
    return _Decoded(torch.stack(outs), top_p, seconds, spec.sequence_bytes(len(layer.k)))


LEGEND = """bits: of an element, parameters and windows included
error: relative, of the attention output
top mass: share that is kept of the probability of each query's most attended token
ms: attention, per token and layer"""


def table(recipes: list[Recipe], layers: list[Layer]) -> Table:
    """Lay the recipes out for a terminal."""
    steps = sum(len(layer.q) for layer in layers)
    title = f"{len(layers)} layers, {len(layers[0].k)} tokens, the last {len(layers[0].q)} decoded"
    result = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    result.add_column("recipe", no_wrap=True)
    for column in ("bits", "B/token", "ratio", "error", "top mass", "ms"):
        result.add_column(column, justify="right", no_wrap=True)
    for r in recipes:
        result.add_row(
            r.name,
            f"{r.bits_per_element:.2f}",
            f"{r.bytes_per_token:.1f}",
            f"{r.compression:.2f}x",
            f"{r.output_error:.4f}",
            f"{r.top_mass_kept:.1%}",
            f"{r.seconds / steps * 1e3:.2f}",
        )
    return result


def to_json(recipes: list[Recipe]) -> dict[str, object]:
    """Return what ``foscar demo --json`` writes."""
    versions = {"foscar": __version__, "torch": torch.__version__}
    return {"versions": versions, "recipes": [asdict(recipe) for recipe in recipes]}


def plot(recipes: list[Recipe], path: Path) -> None:
    """Draw error against bits per element into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for bits, marker in ((2, "o"), (4, "s"), (16, "D")):
        points = [r for r in recipes if r.k_bits == bits]
        x, y = [r.bits_per_element for r in points], [r.output_error for r in points]
        axes.scatter(x, y, marker=marker, s=50, label=f"{bits} bits", zorder=3)
        for r in points:
            axes.annotate(
                r.name,
                (r.bits_per_element, r.output_error),
                xytext=(-6, 8) if bits == 16 else (6, 4),
                textcoords="offset points",
                ha="right" if bits == 16 else "left",
                fontsize=8,
            )
    axes.set(xscale="log", yscale="log", xlabel="bits per element, parameters and windows included")
    axes.set(ylabel="relative error of the attention output", xticks=[2, 3, 4, 6, 8, 16], xlim=(2, 20))
    axes.set_xticklabels(["2", "3", "4", "6", "8", "16"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
