from __future__ import annotations

import os

import emulator
import pytest
import torch

# A console keeps the width that it is made with; tests of tables set their own.
os.environ.pop("COLUMNS", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# Tensors are small here: threads cost more than they bring, above all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setenv("FOSCAR_DEBUG", "1")  # the errors of kernels are then those of the reference
    # With an index, as a tensor's own device has.
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(emulator.COMPILER is None, reason="needs a C++ compiler, g++")),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ]
)
def machine(request: pytest.FixtureRequest) -> torch.device:
    """Where a kernel runs: emulated, or on a GPU."""
    return torch.device(request.param)
