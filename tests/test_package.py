"""The package as a whole: what importing it does, which layer imports which, what it ships."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import foscar

ROOT = Path(foscar.__file__).parent
# From the bottom up: a module imports only from lines above its own.
LAYERS = [
    ["_version", "_checks"],
    ["convert", "layout", "merge"],
    ["rotation"],
    ["reference.quant", "reference.records", "reference.rope", "reference.cache", "reference.attention"],
    ["cuda.config", "cuda.compiler"],
    ["cuda.launch"],
    ["cuda.append", "cuda.decode", "cuda.extend", "cuda.inspect", "cuda.read"],
    ["ops"],
    ["cache"],
    ["attention", "sequences"],
    [""],
    ["demo", "info", "bench.grid"],
    ["bench.results", "bench.workload"],
    ["bench.peers", "bench.plot", "bench.timing"],
    ["bench.run"],
    ["bench.append", "bench.extend"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix("__init__").removesuffix(".")


MODULES = {
    name: path for path in ROOT.rglob("*.py") if (name := module_name(path)) not in ("reference", "cuda", "bench")
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module)
    return found


def test_every_module_has_a_layer() -> None:
    assert set(RANK) == set(MODULES)


@pytest.mark.parametrize("name", RANK)
def test_layers_import_downwards_only(name: str) -> None:
    for imported in imports(MODULES[name]):
        if imported.startswith("foscar."):
            target = imported.removeprefix("foscar.")
            target = target if target in RANK else target.rpartition(".")[0]
            if target in RANK and target:
                same_package = RANK[target] == RANK[name] and target.startswith("reference.")
                assert RANK[target] < RANK[name] or same_package, f"{name} imports {target}"


def test_import_touches_no_driver_and_no_front_end() -> None:
    """Importing foscar and using it on the CPU loads nothing of CUDA, and ends at once where there is no driver."""
    code = """
import sys, torch
loaded = set(sys.modules)
import foscar
spec = foscar.CacheSpec.token_wise(2, 1, 64)
cache = foscar.PagedKVCache(spec, 1)
i32 = lambda x: torch.tensor(x, dtype=torch.int32)
k = torch.randn(3, 1, 64)
foscar.append(cache, k, k, i32([[0]]), i32([0]), i32([0, 3]))
print(foscar.decode_attention(torch.randn(1, 1, 64), cache, i32([[0]]), i32([3])).isfinite().all().item())
packages = {m.split('.')[0] for m in set(sys.modules) - loaded}
print(sorted(packages & {'cuda', 'typer', 'rich', 'matplotlib', 'safetensors'}))
print(torch.cuda.is_initialized())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.split("\n")[:3] == ["True", "[]", "False"], result.stderr


def test_shipped_files() -> None:
    data = resources.files("foscar") / "data"
    sizes = {file.name: file.stat().st_size for file in Path(str(data)).iterdir()}
    assert set(sizes) == {"smollm2_slice.safetensors"} and sum(sizes.values()) <= 4_000_000
    assert (ROOT / "py.typed").exists()
