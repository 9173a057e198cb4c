"""What foscar finds on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from foscar._version import __version__
from foscar.layout import FORMAT_VERSION, HEAD_DIMS, CacheSpec
from foscar.ops import backend

_PACKAGES = ("torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


def collect() -> dict[str, Any]:
    """Gather versions, devices, and the backend that serves each spec. Works, and returns at once, without a driver."""
    versions = {"foscar": __version__, "page format": FORMAT_VERSION, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": platform.processor() or platform.machine()}]
    # is_available() is the gate: without a driver nothing below may touch CUDA's libraries.
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            devices.append(
                {
                    "device": f"cuda:{i}",
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
    return {"versions": versions, "devices": devices, "specs": _served(devices)}


def _served(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for bits in (2, 4):
        for scheme, make in (("token-wise", CacheSpec.token_wise), ("channel-wise K", CacheSpec.kivi)):
            for head_dim in HEAD_DIMS:
                spec = make(bits, 1, head_dim)
                for device in devices:
                    name, reason = backend(spec, torch.bfloat16, torch.device(device["device"]))
                    rows.append(
                        {
                            "spec": f"INT{bits} {scheme}",
                            "head_dim": head_dim,
                            "bits_per_element": spec.bits_per_element,
                            "record_bytes": spec.record_bytes,
                            "device": device["device"],
                            "backend": name,
                            "reason": reason,
                        }
                    )
    return rows


def render(info: dict[str, Any]) -> Group:
    """Lay `collect`'s result out for a terminal."""
    versions = Table(title="versions", show_header=False)
    for name, version in info["versions"].items():
        versions.add_row(name, "not installed" if version is None else str(version))
    devices = Table("device", "name", "capability", "GiB", title="devices")
    for d in info["devices"]:
        devices.add_row(d["device"], d["name"], d.get("capability", ""), str(d.get("memory_gib", "")))
    served: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for s in info["specs"]:
        served.setdefault((s["device"], s["spec"], s["backend"], s["reason"]), []).append(s)
    specs = Table("device", "spec", "bits per element (head_dim)", "backend", "why", title="specs")
    for (device, spec, name, reason), rows in served.items():
        bits = ", ".join(f"{row['bits_per_element']:.3g} ({row['head_dim']})" for row in rows)
        specs.add_row(device, spec, bits, name, reason)
    return Group(versions, devices, specs)
