"""CUDA C++ to cubins, by NVRTC, with a cache on disk. Touches no driver.

The key of an entry is made of the source, the contents of all headers, the options, and the versions of the compiler
and of CUDA's headers. Processes may race for an entry: each compiles, the last to finish leaves its result, and all use
their own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import os
import threading
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parent / "kernels"
_PACKAGES = ("cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


def cache_folder() -> Path:
    """Where cubins are kept: ``foscar`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foscar"


_importing = threading.Lock()


def cuda_core() -> Any:
    """Import ``cuda.core``, a thread at a time: another would see it half imported."""
    with _importing:
        import cuda.core.utils

        return cuda.core


@functools.cache
def _stamp() -> bytes:
    """Digest of everything that a compilation depends on beside source and options."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in _PACKAGES:
        digest.update(f"{package}={importlib.metadata.version(package)}\0".encode())
    return digest.digest()


def compile_cubin(source: str, arch: str, name: str) -> bytes:
    """Compile one translation unit.

    Parameters
    ----------
    source : str
        CUDA C++.
    arch : str
        The architecture, ``"sm_90a"`` for instance.
    name : str
        What the source is called in error messages.

    Returns
    -------
    bytes
        The cubin.

    Raises
    ------
    CompileError
        If NVRTC refuses the source.
    """
    core = cuda_core()
    import cuda.pathfinder

    headers = cuda.pathfinder.find_nvidia_header_directory("cudart")
    options = core.ProgramOptions(arch=arch, std="c++17", include_path=[str(KERNELS), headers], name=f"{name}.cu")
    key = core.utils.make_program_cache_key(
        code=source, code_type="c++", options=options, target_type="cubin", extra_digest=_stamp()
    )
    with core.utils.FileStreamProgramCache(cache_folder()) as cache:
        cubin = cache.get(key)
        if cubin is None:
            log = io.StringIO()
            try:
                cubin = bytes(core.Program(source, "c++", options).compile("cubin", logs=log).code)
            except Exception as error:
                raise CompileError(f"{name} for {arch}: {error}\n{log.getvalue()}") from error
            cache[key] = cubin
    return bytes(cubin)
