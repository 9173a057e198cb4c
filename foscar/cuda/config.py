"""Which kernel serves which spec, and the few lines of source that name its constants."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foscar.layout import CacheSpec, QuantSpec, record_layout

MAX_ROWS = 8
ARCHITECTURES = ("sm_90a",)
_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
# Shared memory of an SM that CTAs can have on Hopper, and what a CTA needs beside its stages.
_SM_SHARED_BYTES = 227 * 1024
_EXTRA_BYTES = 1024 + 3072
# Partial results of an SM, of whichever variant: one for each of 8 warps and two for the CTA, of 2 CTAs with head_dim
# up to 128 or of 1 with 256.
SM_PARTIAL_FLOATS = (8 + 2) * 2 * MAX_ROWS * (128 + 2)


def _groups(quant: QuantSpec, head_dim: int) -> int:
    """Into how many groups a token's channels fall; one if they are quantised channel-wise."""
    assert quant.group_size is not None
    return 1 if quant.axis == "channel" else head_dim // quant.group_size


def _shape(spec: CacheSpec, dtype: torch.dtype, halves: bool) -> tuple[int, int]:
    """CTAs of an SM and warps of each: 16, 12 or 8 warps, with 128, 168 or 255 registers for a thread.

    Which of them a variant needs not to spill was found by compiling all (`foscar kernels --all`).
    """
    k, v, head_dim = spec.k, spec.v, spec.head_dim
    k_groups, v_groups = _groups(k, head_dim), _groups(v, head_dim)
    token_wise = not spec.block_wise
    if head_dim == 256:
        return 1, 8
    if k.axis == "channel" and dtype == torch.float16 and head_dim == 128:
        return 1, 8
    if token_wise and k.bits == 4 and halves and k_groups == v_groups == 4:
        return 1, 8
    small = {
        64: True,
        96: (k.axis == "channel" and dtype == torch.bfloat16) or (token_wise and k_groups == 1),
        128: token_wise and k.bits == 2 and max(k_groups, v_groups) <= (2 if halves else 1),
    }
    return 2, 8 if small[head_dim] else 6


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
        Warps of a CTA, and records in flight for each.
    ctas : int
        CTAs of an SM.
    """

    spec: CacheSpec
    dtype: torch.dtype
    halves: bool
    warps: int
    stages: int
    ctas: int

    @staticmethod
    def choose(spec: CacheSpec, dtype: torch.dtype, rows: int) -> DecodeConfig:
        """Pick the variant for a number of query rows of a KV head, and its shape.

        As many warps as their registers leave room for, then as many stages as fit, up to 4.
        """
        # Halves of columns would need a few more registers than there are, were there 8 groups of both.
        eight_groups = _groups(spec.k, spec.head_dim) == _groups(spec.v, spec.head_dim) == 8
        halves = rows <= MAX_ROWS // 2 and not eight_groups
        ctas, warps = _shape(spec, dtype, halves)
        budget = _SM_SHARED_BYTES // ctas - _EXTRA_BYTES
        while budget // (warps * spec.record_bytes) < 2:
            warps -= 1
        return DecodeConfig(spec, dtype, halves, warps, min(budget // (warps * spec.record_bytes), 4), ctas)

    @property
    def partial_floats(self) -> int:
        """float32 numbers of a partial result."""
        return MAX_ROWS * (self.spec.head_dim + 2)

    @property
    def name(self) -> str:
        """What the variant is called in tables and logs."""
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        rows = MAX_ROWS // 2 if self.halves else MAX_ROWS
        k, v = (f"{quant.bits}{quant.axis[0]}{quant.group_size}" for quant in (self.spec.k, self.spec.v))
        return f"decode_k{k}_v{v}_d{self.spec.head_dim}_r{rows}_{kind}"

    def shared_bytes(self, batch: int) -> int:
        """Dynamic shared memory of a CTA for a batch: `SharedMemory` in decode.cuh."""
        stages = self.warps * self.stages * (self.spec.record_bytes + 8 + 8)
        partials = 2 * self.warps * (4 + 3 * MAX_ROWS * 4) + 2 * MAX_ROWS * 4
        tail = stages + partials + self.warps * 4 + 4 + 4 * (batch + 1)
        return -(-tail // 128) * 128

    def source(self) -> str:
        """Return the translation unit: constants, and an entry without a mangled name."""
        layout = record_layout(self.spec)
        k, v = self.spec.k, self.spec.v
        constants = {
            "kHeadDim": self.spec.head_dim,
            "kKBits": k.bits,
            "kVBits": v.bits,
            "kKGroups": _groups(k, self.spec.head_dim),
            "kVGroups": _groups(v, self.spec.head_dim),
            "kKCodes": layout.k.code_offset,
            "kKParams": layout.k.param_offset,
            "kVCodes": layout.v.code_offset,
            "kVParams": layout.v.param_offset,
            "kRecordBytes": layout.nbytes,
            "kWarps": self.warps,
            "kStages": self.stages,
            "kMinUnits": 1,
        }
        flags = {
            "kKChannelWise": k.axis == "channel",
            "kVChannelWise": v.axis == "channel",
            "kHalves": self.halves,
        }
        lines = "\n".join(
            [f"  static constexpr int {name} = {value};" for name, value in constants.items()]
            + [f"  static constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
        )
        return (
            '#include "decode.cuh"\n'
            f"struct Config {{\n  using T = {_TYPES[self.dtype]};\n{lines}\n}};\n"
            f'extern "C" __global__ __launch_bounds__({self.warps * 32}, {self.ctas})\n'
            "void decode(const __grid_constant__ foscar::DecodeArguments args) { foscar::decode<Config>(args); }\n"
        )


def unsupported(spec: CacheSpec, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why no kernel serves this, or None."""
    if capability != (9, 0):
        return f"kernels are for compute capability 9.0, this is {capability[0]}.{capability[1]}"
    if dtype not in _TYPES:
        return f"kernels take bfloat16 and float16 queries, not {str(dtype)[6:]}"
    if spec.exact_tokens:
        return "kernels do not read exact tokens yet"
    if dtype == torch.float16 and spec.k.axis == "channel" and spec.head_dim == 256:
        return "a float16 query takes too many registers for channel-wise keys of head_dim 256"
    return None
