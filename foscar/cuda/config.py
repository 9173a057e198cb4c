"""Which kernel serves which spec, and the few lines of source that name its constants."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from foscar.layout import PAGE_SIZE, CacheSpec, QuantSpec, record_layout

MAX_ROWS = 8
LONGEST_WINDOW = 1 << 30  # more than any sequence has, and far from the ends of a 32-bit integer
ARCHITECTURES = ("sm_90a",)
_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
# Shared memory of an SM of Hopper; the system takes 1 KiB for each CTA.
_SM_SHARED_BYTES = 228 * 1024
# float32 numbers that an SM's partial results take, of whichever variant: two of the CTA, as many again for maxima and
# sums, and one of each of its warps, 8 with head_dim 256 or 16 with 128.
_MAX_PART_FLOATS = MAX_ROWS * 256
CTA_PART_FLOATS = 2 * 2 * _MAX_PART_FLOATS
WARP_PART_FLOATS = 8 * _MAX_PART_FLOATS


def _groups(quant: QuantSpec, head_dim: int) -> int:
    """Into how many groups a token's channels fall; one if they are quantised channel-wise."""
    assert quant.group_size is not None
    return 1 if quant.axis == "channel" else head_dim // quant.group_size


def _warps(spec: CacheSpec, dtype: torch.dtype, halves: bool) -> int:
    """Warps of a CTA: 16, 12 or 8, with 128, 168 or 255 registers for a thread.

    The most that take no spills, but for a few rare mixes: a simple rule gives them less, and 8 spill a little with
    head_dim 256, V in groups of 32, and K channel-wise or in such groups. What each variant takes was found by
    compiling all of them (`foscar kernels --all`).
    """
    k, v, head_dim, exact = spec.k, spec.v, spec.head_dim, spec.exact_tokens > 0
    k_groups, v_groups = _groups(k, head_dim), _groups(v, head_dim)
    v_plain = v.axis == "token" and v_groups == 1
    if head_dim == 256:
        return 8
    if k.axis == "channel":  # the operand is made for each page, of a float16 query in two parts
        bf16 = dtype == torch.bfloat16
        if head_dim == 128:
            return 8
        if head_dim == 96:
            return 12 if halves or (bf16 and v.axis == "token") else 8
        return 16 if halves and (bf16 or v_plain) else 12
    if head_dim < 128:
        return 16 if v_plain and (k_groups == 1 or halves or not exact) else 12
    if v_plain and k_groups == 1:
        return 12 if exact and 4 in (k.bits, v.bits) else 16
    return 8 if k_groups == 4 and halves and (exact or k.bits == 4) else 12


@dataclass(frozen=True)
class DecodeConfig:
    """A variant of the decode kernel.

    Attributes
    ----------
    spec : CacheSpec
        What it reads.
    dtype : torch.dtype
        dtype of the query and the output: bfloat16 or float16.
    halves : bool
        Whether up to 4 query rows of a KV head are each worked on by two halves of a warp's columns.
    small : bool
        Whether two CTAs have room on an SM, one of a launch and one of the next, which so begins while this one ends.
    warps, stages : int
        Warps of a CTA, and records in flight for each.
    """

    spec: CacheSpec
    dtype: torch.dtype
    halves: bool
    small: bool
    warps: int
    stages: int

    @staticmethod
    def choose(spec: CacheSpec, dtype: torch.dtype, rows: int, small: bool = False) -> DecodeConfig:
        """Pick the variant for a number of query rows of a KV head, and its shape.

        As many warps as their registers leave room for, then as many stages as fit, up to 4. If there is little work,
        half an SM instead, with 8 warps of at least 3 stages, or at least 4 for few rows, which take less arithmetic:
        where 16 warps would have the registers, and there are no exact tokens, with which no work is dealt out early.
        """
        # Halves of columns would need a few more registers than there are, were there 8 groups of both.
        eight_groups = _groups(spec.k, spec.head_dim) == _groups(spec.v, spec.head_dim) == 8
        halves = rows <= MAX_ROWS // 2 and not eight_groups
        most = _warps(spec, dtype, halves)
        sizes = [(False, *size) for size in itertools.product(range(most, 0, -1), (4, 3, 2))]
        if small and most == 16 and not spec.exact_tokens:
            sizes = [(True, *size) for size in itertools.product(range(8, 3 if halves else 7, -1), (4, 3))] + sizes
        shapes = (DecodeConfig(spec, dtype, halves, *size) for size in sizes)
        return next(shape for shape in shapes if shape.ctas * (shape.shared_bytes + 1024) <= _SM_SHARED_BYTES)

    @property
    def name(self) -> str:
        """What the variant is called in tables and logs."""
        rows = MAX_ROWS // 2 if self.halves else MAX_ROWS
        return _name("decode", self.spec, self.dtype, f"_r{rows}", "_small" if self.small else "")

    @property
    def ctas(self) -> int:
        """CTAs that an SM has room for."""
        return 2 if self.small else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * 32

    @property
    def units(self) -> int:
        """Units that a warp looks up, half of them at a time: fewer where 8 warps of 3 stages must fit half an SM."""
        return 16 if self.small else 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: `SharedMemory` in decode.cuh."""
        stages = self.warps * (self.stages * (self.spec.record_bytes + 8) + self.units * 16 + 8 + 3 * 4)
        slots = 2 * self.warps * (4 + 4 + 2 * MAX_ROWS * 4)
        return -(-(stages + slots) // 128) * 128

    def source(self) -> str:
        """Return the translation unit: constants, and an entry without a mangled name."""
        constants = {
            "kWarps": self.warps,
            "kStages": self.stages,
            "kUnits": self.units,
            "kSharedBytes": self.shared_bytes,
            "kHalves": self.halves,
            "kBf16": self.dtype == torch.bfloat16,
        }
        return _source("decode", self.spec, self.dtype, constants, f"{self.threads}, {self.ctas}")


@dataclass(frozen=True)
class AppendConfig:
    """A variant of the append kernel.

    Attributes
    ----------
    spec : CacheSpec
        What it writes.
    dtype : torch.dtype
        dtype of K and V: bfloat16, float16 or float32.
    rotates_k, rotates_v : bool
        Whether new keys or values are rotated, by a Hadamard transform if the spec says so, else by a matrix.
    """

    spec: CacheSpec
    dtype: torch.dtype
    rotates_k: bool = False
    rotates_v: bool = False
    threads = 128

    @property
    def name(self) -> str:
        """What the variant is called in tables and logs."""
        rotated = "".join(name for name, does in (("k", self.rotates_k), ("v", self.rotates_v)) if does)
        return _name("append", self.spec, self.dtype, rotated and f"_r{rotated}")

    @property
    def ctas(self) -> int:
        """CTAs that an SM has room for. A warp that rotates holds its rows in registers."""
        most = 6 if not self.rotates_k and not self.rotates_v else 4 if self.spec.head_dim <= 128 else 2
        return min(_SM_SHARED_BYTES // (self.shared_bytes + 1024), most)

    @staticmethod
    def _rotation(rotates: bool, quant: QuantSpec) -> int:
        """`kHadamard` or `kMatrix` in rotate.cuh, or neither."""
        return 0 if not rotates else 1 if quant.hadamard else 2

    def block_tokens(self, by_warps: bool) -> int:
        """Tokens that a team takes at a time, a warp or a CTA: blocks of channel-wise operands are pages."""
        return PAGE_SIZE * 32 // self.threads if by_warps else PAGE_SIZE

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: `AppendMemory` in append.cuh."""
        head_dim = self.spec.head_dim
        groups = max(_groups(self.spec.k, head_dim), _groups(self.spec.v, head_dim))
        values = 2 * PAGE_SIZE * (head_dim * self.dtype.itemsize + 16)
        return values + 16 * max(PAGE_SIZE * groups, head_dim) + 8 * max(PAGE_SIZE, head_dim)

    def source(self) -> str:
        """Return the translation unit: constants, and an entry without a mangled name."""
        constants = {
            "kThreads": self.threads,
            "kSharedBytes": self.shared_bytes,
            "kKKept": _kept(self.spec.k, self.spec.head_dim),
            "kVKept": _kept(self.spec.v, self.spec.head_dim),
            "kKRotation": self._rotation(self.rotates_k, self.spec.k),
            "kVRotation": self._rotation(self.rotates_v, self.spec.v),
            "kBf16": self.dtype == torch.bfloat16,
        }
        return _source("append", self.spec, self.dtype, constants, f"{self.threads}, {self.ctas}")


@dataclass(frozen=True)
class ExtendConfig:
    """A variant of the kernel that extends.

    Attributes
    ----------
    spec : CacheSpec
        What it reads.
    dtype : torch.dtype
        dtype of the query, of new keys and values, and of the output: bfloat16 or float16.
    row_tiles : int
        16-row tiles of a warp: at most as many as its registers hold the output of.
    """

    spec: CacheSpec
    dtype: torch.dtype
    row_tiles: int
    warps = 4
    threads = 32 * warps

    @staticmethod
    def choose(spec: CacheSpec, dtype: torch.dtype, rows: int) -> ExtendConfig:
        """Pick the variant for so many query rows of a KV head and sequence."""
        few = rows <= 16 * ExtendConfig.warps or spec.head_dim > 128
        return ExtendConfig(spec, dtype, 1 if few else 2)

    @property
    def name(self) -> str:
        """What the variant is called in tables and logs."""
        return _name("extend", self.spec, self.dtype, f"_r{self.tile_rows}")

    @property
    def tile_rows(self) -> int:
        """Query rows of a KV head that a CTA works on."""
        return 16 * self.row_tiles * self.warps

    @property
    def ctas(self) -> int:
        """CTAs that an SM has room for."""
        registers = 3 if self.row_tiles == 1 and self.spec.head_dim <= 128 else 2  # are for so many
        return min(_SM_SHARED_BYTES // (self.shared_bytes + 1024), registers)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: `ExtendMemory` in extend.cuh."""
        return self.spec.record_bytes + (2 * PAGE_SIZE + self.tile_rows) * self.spec.head_dim * 2 + 128

    def source(self) -> str:
        """Return the translation unit: constants, and an entry without a mangled name."""
        constants = {
            "kWarps": self.warps,
            "kRowTiles": self.row_tiles,
            "kSharedBytes": self.shared_bytes,
            "kBf16": self.dtype == torch.bfloat16,
        }
        return _source("extend", self.spec, self.dtype, constants, f"{self.threads}, {self.ctas}")


KernelConfig = AppendConfig | DecodeConfig | ExtendConfig


def _name(kernel: str, spec: CacheSpec, dtype: torch.dtype, rows: str = "", small: str = "") -> str:
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    exact = "_exact" if spec.exact_tokens else ""
    return f"{kernel}_k{spec.k}_v{spec.v}_d{spec.head_dim}{rows}{exact}{small}_{kind}"


def _kept(quant: QuantSpec, head_dim: int) -> int:
    """How many magnitudes of a row are left as they are; 0 if it is not clipped."""
    size = head_dim if quant.axis == "token" else PAGE_SIZE
    return 0 if quant.clip == 1 else quant.clip_rank(size) + 1


def _source(name: str, spec: CacheSpec, dtype: torch.dtype, more: dict[str, int | bool], bounds: str) -> str:
    layout = record_layout(spec)
    constants: dict[str, int | bool] = {
        "kHeadDim": spec.head_dim,
        "kKVHeads": spec.num_kv_heads,
        "kKBits": spec.k.bits,
        "kVBits": spec.v.bits,
        "kKGroups": _groups(spec.k, spec.head_dim),
        "kVGroups": _groups(spec.v, spec.head_dim),
        "kKChannelWise": spec.k.axis == "channel",
        "kVChannelWise": spec.v.axis == "channel",
        "kExact": spec.exact_tokens > 0,
        "kKCodes": layout.k.code_offset,
        "kKParams": layout.k.param_offset,
        "kVCodes": layout.v.code_offset,
        "kVParams": layout.v.param_offset,
        "kRecordBytes": layout.nbytes,
        **more,
    }
    lines = "\n".join(
        f"  static constexpr {type(value).__name__} {constant} = {str(value).lower()};"
        for constant, value in constants.items()
    )
    return (
        f'#include "{name}.cuh"\n'
        f"struct Config {{\n  using T = {_TYPES[dtype]};\n{lines}\n}};\n"
        f'extern "C" __global__ __launch_bounds__({bounds})\n'
        f"void {name}(const __grid_constant__ foscar::{name.title()}Arguments args) {{\n"
        f"  foscar::{name}<Config>(args);\n}}\n"
    )


def unsupported(spec: CacheSpec, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why no kernel serves this, or None."""
    if capability != (9, 0):
        return f"kernels are for compute capability 9.0, this is {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels take bfloat16 and float16 queries, not {str(dtype)[6:]}"
    if dtype == torch.float16 and spec.k.axis == "channel" and spec.head_dim == 256:
        return "a float16 query takes too many registers for channel-wise keys of head_dim 256"
    return None
