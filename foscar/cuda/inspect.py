"""What the compiler made of the kernels: resources and machine code. Needs no GPU."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from foscar.cuda.compiler import compile_cubin
from foscar.cuda.config import MAX_ROWS, DecodeConfig, KernelConfig, unsupported
from foscar.layout import HEAD_DIMS, PAGE_SIZE, CacheSpec, QuantSpec

# Fields of the halves or bytes of a word, and shifts that bring others down.
_MASKS = r"0x(?:30003|c000c|300030|c000c0|3f003f|f000f|f000f0|ff00ff|3030303|c0c0c0c|f0f0f0f)\b"
_UNPACK = re.compile(rf"\b(?:LOP3\.LUT.*{_MASKS}|SHF\.R\.U32\.HI R\d+, RZ, 0x[2468],)")
# Other ways to turn codes into operands, and what of softmax looks like one.
_CONVERT = re.compile(r"\b(?:PRMT|I2F\w*|I2FP\S*|F2F\w*|SGXT|BFE|HADD2\.F32)\b")
_TENSOR = re.compile(r"\b((?:H|I|Q|HG|IG|QG)MMA\.[\w.]+)")


class ToolMissingError(RuntimeError):
    """A disassembler is not installed."""


@dataclass(frozen=True)
class KernelReport:
    """One variant.

    Attributes
    ----------
    name, arch : str
        The variant, and what it was compiled for.
    k, v : str
        How the keys and values that it reads are quantised, "2t128" for instance.
    k_bits, v_bits, head_dim, rows : int
        Of what it reads, and the most query rows of a KV head that it takes.
    warps, stages : int
        Warps of a CTA, of which an SM has one, or two if it is small, and records in flight for each.
    registers : int
        Of a thread.
    spill_bytes : int
        Stack of a thread.
    shared_bytes : int
        Dynamic shared memory of a CTA.
    alu_per_element : float
        Instructions that turn codes into operands, for each element of K and V.
    opcodes : dict
        Tensor-core instructions of a page, and how many; those of exact tokens are not counted.
    """

    name: str
    arch: str
    k: str
    v: str
    k_bits: int
    v_bits: int
    head_dim: int
    rows: int
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    alu_per_element: float
    opcodes: dict[str, int]


def shipped_variants() -> Iterator[DecodeConfig]:
    """Yield the variants that `DecodeConfig.choose` can pick.

    Those for fp16 are left out, for time, unless K is channel-wise: they differ in load, store and exact tokens, and
    plain 2-bit keys take a few more shifts.
    """
    for head_dim in HEAD_DIMS:
        for k in _quantizers(head_dim):
            for v in _quantizers(head_dim):
                for dtype in _dtypes(CacheSpec(k, v, 8, head_dim)):
                    # A block that is being filled is exact, too.
                    for sinks in (64,) if "channel" in (k.axis, v.axis) else (0, 64):
                        spec = CacheSpec(k, v, 8, head_dim, sink_tokens=sinks)
                        calls = itertools.product((MAX_ROWS // 2, MAX_ROWS), (False, True))
                        shapes = (DecodeConfig.choose(spec, dtype, *call) for call in calls)
                        yield from dict.fromkeys(shapes)


def sample_variants() -> Iterator[DecodeConfig]:
    """Yield all token-wise variants without groups, and of the others some that have each scheme of K and of V."""
    for head_dim in HEAD_DIMS:
        quantizers = _quantizers(head_dim)
        plain, others = quantizers[:2], quantizers[2:]
        sample = [(k, v, rows) for k in plain for v in plain for rows in (MAX_ROWS // 2, MAX_ROWS)]
        for i, k in enumerate(others):
            sample.append((k, (others + plain)[i + 1], MAX_ROWS // (1 + i % 2)))
        for i, (k, v, rows) in enumerate(sample):
            spec = CacheSpec(k, v, 8, head_dim, sink_tokens=i // 2 % 2 * 64)
            dtypes = _dtypes(spec)
            shapes = (DecodeConfig.choose(spec, dtypes[i % len(dtypes)], rows, small) for small in (False, True))
            yield from dict.fromkeys(shapes)


def _quantizers(head_dim: int) -> list[QuantSpec]:
    """All ways to quantise K or V, those without groups first."""
    sizes = dict.fromkeys(size for size in (head_dim, 64, 32) if head_dim % size == 0)
    token_wise = [QuantSpec(bits, "token", size) for size in sizes for bits in (2, 4)]
    return token_wise + [QuantSpec(bits, "channel", PAGE_SIZE) for bits in (2, 4)]


def _dtypes(spec: CacheSpec) -> list[torch.dtype]:
    both = (torch.bfloat16, torch.float16) if spec.k.axis == "channel" else (torch.bfloat16,)
    return [dtype for dtype in both if unsupported(spec, dtype, (9, 0)) is None]


def disassemble(config: KernelConfig, arch: str) -> tuple[int, int, str]:
    """Compile a variant; return its registers and bytes of stack for each thread, and its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / f"{config.name}.cubin"
        cubin.write_bytes(compile_cubin(config.source(), arch, config.name))
        usage = _run("cuobjdump", "--dump-resource-usage", cubin)
        sass = _run("nvdisasm", "-c", cubin)
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    return registers, stack, sass


def inspect(config: DecodeConfig, arch: str) -> KernelReport:
    """Compile a variant and read resources and instructions off its cubin.

    Raises
    ------
    ToolMissingError
        If cuobjdump or nvdisasm is not installed; both are among the ``dev`` requirements.
    CompileError
        If the kernel does not compile.
    """
    registers, stack, sass = disassemble(config, arch)
    # Blocks of code that is entered at their labels. Exact tokens, not a page's, come by matrix loads.
    blocks = [block.splitlines() for block in re.split(r"^\.L_x_\d+:", sass, flags=re.M) if "LDSM" not in block]
    first = next(i for i, block in enumerate(blocks) if any(map(_TENSOR.search, block)))
    lines = [line for block in blocks[first:] for line in block]  # a loop over a page's passes, or the whole page
    products = [i for i, line in enumerate(lines) if _TENSOR.search(line)]
    opcodes: dict[str, int] = {}
    for i in products:
        name = _TENSOR.findall(lines[i])[0]
        opcodes[name] = opcodes.get(name, 0) + 1
    operations = sum(bool(_UNPACK.search(line) or _CONVERT.search(line)) for line in lines[: products[-1] + 1])
    passes = 1 if config.halves else 2
    copies = 2  # of a pass's code: for plain pages, and for all
    elements = copies * 2 * PAGE_SIZE * config.spec.head_dim // 32 // passes  # of a lane
    return KernelReport(
        config.name,
        arch,
        str(config.spec.k),
        str(config.spec.v),
        config.spec.k.bits,
        config.spec.v.bits,
        config.spec.head_dim,
        MAX_ROWS // 2 if config.halves else MAX_ROWS,
        config.warps,
        config.stages,
        registers,
        stack,
        config.shared_bytes,
        round(operations / elements, 3),
        {name: count * passes // copies for name, count in opcodes.items()},
    )


def table(reports: list[KernelReport]) -> Table:
    """Lay reports out for a terminal."""
    result = Table(title=f"{len(reports)} kernels for {reports[0].arch}")
    for column in ("kernel", "registers", "spills", "shared", "warps x stages", "ALU/element", "tensor cores"):
        left = column in ("kernel", "tensor cores")
        result.add_column(column, justify="left" if left else "right", no_wrap=column == "kernel", overflow="fold")
    for r in reports:
        shape = f"{r.warps} x {r.stages}"
        opcodes = ", ".join(f"{count} {name}" for name, count in r.opcodes.items())
        alu = f"{r.alu_per_element:.3f}"
        result.add_row(r.name, str(r.registers), str(r.spill_bytes), str(r.shared_bytes), shape, alu, opcodes)
    return result


def _run(tool: str, *arguments: str | Path) -> str:
    import cuda.pathfinder

    path = cuda.pathfinder.find_nvidia_binary_utility(tool) or shutil.which(tool)
    if path is None:
        raise ToolMissingError(f"{tool} is not installed; it is among the requirements of foscar[dev]")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
