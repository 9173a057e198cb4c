from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import foscar
from foscar import demo
from foscar.cli import app

RECIPES = ["BF16"] + [
    f"INT{bits} {name}" for bits in (4, 2) for name in ("token-wise", "channel-wise K", "channel-wise K + windows")
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_demo() -> None:
    result = CliRunner().invoke(app, ["demo", "--json", "out.json"], catch_exceptions=False)
    assert result.exit_code == 0
    recipes = {r["name"]: r for r in json.loads(Path("out.json").read_text())["recipes"]}
    assert list(recipes) == RECIPES
    for name, r in recipes.items():
        assert name in result.stdout
        assert (r["k_bits"], r["v_bits"]) == ((16, 16) if name == "BF16" else (int(name[3]),) * 2)
        assert r["bits_per_element"] == pytest.approx(r["bytes_per_token"] * 8 / (3 * 2 * 64))
        assert r["compression"] == pytest.approx(16 / r["bits_per_element"])
        assert 0 < r["top_mass_kept"] <= 1 and r["seconds"] > 0
    errors = {name: r["output_error"] for name, r in recipes.items()}
    assert errors["BF16"] < 3e-3
    for scheme in ("token-wise", "channel-wise K", "channel-wise K + windows"):
        assert errors["BF16"] < errors[f"INT4 {scheme}"] < errors[f"INT2 {scheme}"]
    for bits in (2, 4):
        assert errors[f"INT{bits} channel-wise K + windows"] < errors[f"INT{bits} channel-wise K"]
        assert errors[f"INT{bits} channel-wise K"] < errors[f"INT{bits} token-wise"]
    # What 4096 tokens take: 64 pages of records, or 61, 64 sink tokens and a ring of 128 + 64.
    assert recipes["INT2 token-wise"]["bytes_per_token"] == 3 * 2560 / 64
    assert recipes["INT2 channel-wise K + windows"]["bytes_per_token"] == 3 * (61 * 2560 + 256 * 2 * 64 * 2) / 4096
    assert matplotlib.image.imread("foscar-demo.png").shape[2] == 4


def test_demo_of_other_activations() -> None:
    tensors = {}
    for i in (0, 12):
        tensors[f"layer{i}.k"], tensors[f"layer{i}.v"] = torch.randn(200, 2, 128), torch.randn(200, 2, 128)
        tensors[f"layer{i}.q"] = torch.randn(2, 6, 128)
    save_file(tensors, "mine.safetensors")
    arguments = ["demo", "--activations", "mine.safetensors", "--plot", "mine.png", "--json", "mine.json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and Path("mine.png").exists()
    recipes = json.loads(Path("mine.json").read_text())["recipes"]
    assert [r["name"] for r in recipes] == RECIPES
    assert recipes[0]["bytes_per_token"] == 2 * 2 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": (4,)}, "must hold tensors layer<i>.k"),
        ({"layer3.k": (9, 1, 64), "layer3.v": (9, 1, 64)}, "must hold ['layer3.q']"),
        ({"layer3.k": (9, 1, 64), "layer3.v": (9, 1, 96), "layer3.q": (1, 1, 64)}, "layer3=[[9, 1, 64], [9, 1, 96]"),
        ({"layer3.k": (9, 2, 64), "layer3.v": (9, 2, 64), "layer3.q": (1, 3, 64)}, "a multiple of the heads"),
        ({"layer3.k": (9, 2, 64), "layer3.v": (9, 2, 64), "layer3.q": (9, 2, 64)}, "q with fewer tokens"),
        ({"layer3.k": (9, 1, 80), "layer3.v": (9, 1, 80), "layer3.q": (1, 1, 80)}, "head_dim=80: must be one of"),
    ],
)
def test_demo_refuses_what_does_not_fit(tensors: dict[str, tuple[int, ...]], message: str) -> None:
    save_file({name: torch.randn(shape) for name, shape in tensors.items()}, "bad.safetensors")
    result = CliRunner().invoke(app, ["demo", "--activations", "bad.safetensors"], env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert message in result.stdout.replace("\n", " ")
    assert not Path("foscar-demo.png").exists()


def test_demo_refuses_what_is_not_safetensors() -> None:
    Path("bad.safetensors").write_text("not this")
    result = CliRunner().invoke(app, ["demo", "--activations", "bad.safetensors"], env={"COLUMNS": "400"})
    assert result.exit_code == 1 and "must be a safetensors file" in result.stdout
    assert CliRunner().invoke(app, ["demo", "--activations", "absent"]).exit_code == 2


def test_info() -> None:
    result = CliRunner().invoke(app, ["info", "--json", "info.json"], catch_exceptions=False)
    assert result.exit_code == 0
    info = json.loads(Path("info.json").read_text())
    assert info["versions"]["foscar"] == foscar.__version__ in result.stdout
    assert torch.__version__.startswith(info["versions"]["torch"])
    assert info["devices"][0]["device"] == "cpu"
    assert {s["backend"] for s in info["specs"]} == {"reference"} and "reference" in result.stdout
    sizes = {(s["spec"], s["head_dim"]): s["record_bytes"] for s in info["specs"]}
    assert sizes["INT2 token-wise", 128] == 4608 and sizes["INT4 channel-wise K", 128] == 8960


def test_info_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foscar.info._PACKAGES", ("no-such-package",))
    assert "not installed" in CliRunner().invoke(app, ["info"]).stdout


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_an_output_that_cannot_be_written_is_refused_first(option: str) -> None:
    result = CliRunner().invoke(app, ["demo", option, "absent/out"], env={"COLUMNS": "400"})
    assert result.exit_code == 1 and "absent/out: there is no such folder" in result.stdout
    assert "BF16" not in result.stdout


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.strip() == f"foscar {foscar.__version__}"


def test_python_dash_m() -> None:
    result = subprocess.run([sys.executable, "-m", "foscar", "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "demo" in result.stdout and "info" in result.stdout


def test_shipped_activations() -> None:
    layers = demo.load_activations()
    assert [layer.k.shape for layer in layers] == [(4096, 1, 64)] * 3
    assert all(layer.q.shape == (32, 3, 64) and layer.sm_scale == 0.125 for layer in layers)
    assert all(layer.k.dtype == torch.bfloat16 for layer in layers)
