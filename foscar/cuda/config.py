"""Which kernel serves which spec, and the few lines of source that name its constants."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foscar.layout import CacheSpec, record_layout

MAX_ROWS = 8
ARCHITECTURES = ("sm_90a",)
_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# Shared memory of an SM that CTAs can have on Hopper, and what a CTA needs beside its stages.
_SM_SHARED_BYTES = 227 * 1024
_EXTRA_BYTES = 11 * 1024
# Channels of a head in blocks of 16, at most; and partial results of an SM, of whichever variant: one for each of 16
# warps with head_dim 128 or of 8 with 256, and two, with their statistics, for the CTA.
MAX_TILES = 16
SM_PART_FLOATS = (16 // 2 + 2 * 2) * MAX_TILES * 128


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
        Whether there are at most 4 query rows for a KV head, each worked on by two halves of a warp's columns.
    warps, stages : int
        Warps of a CTA, of which an SM has one, and records in flight for each.
    """

    spec: CacheSpec
    dtype: torch.dtype
    halves: bool
    warps: int
    stages: int

    @staticmethod
    def choose(spec: CacheSpec, dtype: torch.dtype, rows: int) -> DecodeConfig:
        """Pick the variant for a number of query rows of a KV head, and its shape.

        As many warps as registers allow, in one CTA, then as many stages as fit, up to 4. Sixteen warps leave 128
        registers to each; with 4-bit keys, or with exact tokens for 8 rows, head_dim 96 and 128 need more.
        """
        halves = rows <= MAX_ROWS // 2
        warps = 16
        if spec.head_dim == 256:
            warps = 8
        elif spec.head_dim in (96, 128) and (spec.k.bits == 4 or (spec.exact_tokens and not halves)):
            warps = 12
        budget = _SM_SHARED_BYTES - _EXTRA_BYTES
        while budget // (warps * spec.record_bytes) < 2:
            warps -= 1
        return DecodeConfig(spec, dtype, halves, warps, min(budget // (warps * spec.record_bytes), 4))

    @property
    def tiles(self) -> int:
        """Blocks of 16 channels of the output."""
        return self.spec.head_dim // 16

    @property
    def part_floats(self) -> int:
        """float32 numbers of a warp's partial result."""
        return self.tiles * (64 if self.halves else 128)

    @property
    def name(self) -> str:
        """What the variant is called in tables and logs."""
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        rows = MAX_ROWS // 2 if self.halves else MAX_ROWS
        exact = "_exact" if self.spec.exact_tokens else ""
        return f"decode_k{self.spec.k.bits}v{self.spec.v.bits}_d{self.spec.head_dim}_r{rows}{exact}_{kind}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: `SharedMemory` in decode.cuh."""
        stages = self.warps * (self.stages * (self.spec.record_bytes + 8) + 32 * 16 + 8 + 8)
        slots = 2 * self.warps * (4 + 4 + 2 * MAX_ROWS * 4)
        return -(-(stages + slots) // 128) * 128

    def source(self) -> str:
        """Return the translation unit: constants, and an entry without a mangled name."""
        layout = record_layout(self.spec)
        constants = {
            "kHeadDim": self.spec.head_dim,
            "kKVHeads": self.spec.num_kv_heads,
            "kKBits": self.spec.k.bits,
            "kVBits": self.spec.v.bits,
            "kKCodes": layout.k.code_offset,
            "kKParams": layout.k.param_offset,
            "kVCodes": layout.v.code_offset,
            "kVParams": layout.v.param_offset,
            "kRecordBytes": layout.nbytes,
            "kWarps": self.warps,
            "kStages": self.stages,
            "kSharedBytes": self.shared_bytes,
        }
        lines = "\n".join(f"  static constexpr int {name} = {value};" for name, value in constants.items())
        return (
            '#include "decode.cuh"\n'
            f"struct Config {{\n  using T = {_TYPES[self.dtype]};\n"
            f"  static constexpr bool kHalves = {str(self.halves).lower()};\n"
            f"  static constexpr bool kExact = {str(self.spec.exact_tokens > 0).lower()};\n{lines}\n}};\n"
            f'extern "C" __global__ __launch_bounds__({self.warps * 32}, 1)\n'
            "void decode(const __grid_constant__ foscar::DecodeArguments args) { foscar::decode<Config>(args); }\n"
        )


def unsupported(spec: CacheSpec, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why no kernel serves this, or None."""
    if capability != (9, 0):
        return f"kernels are for compute capability 9.0, this is {capability[0]}.{capability[1]}"
    if dtype not in _TYPES:
        return f"kernels take bfloat16 and float16 queries, not {str(dtype)[6:]}"
    if spec.block_wise:
        return "kernels do not read channel-wise operands yet"
    if spec.head_dim not in (spec.k.group_size, spec.v.group_size) or spec.k.group_size != spec.v.group_size:
        return "kernels do not read groups smaller than head_dim yet"
    return None
