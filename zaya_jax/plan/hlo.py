"""Reads a compiled program: products, collectives, and what is scheduled while they are under way.

The text of a scheduled HLO module lists each computation's instructions in the order in which they
start. A collective is a pair of instructions, start and done; what stands between them runs meanwhile.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8, "bf16": 16, "f16": 16,
    "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = ")
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%([^\s,)]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
OP_NAME = re.compile(r'op_name="([^"]*)"')
GROUPED_PRODUCT = "__cublas$lt$groupedMatmul"
LIBRARY_PRODUCT = re.compile(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)')
BACKEND_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["(\d+)"')


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of one array.

    Attributes:
      dtype: HLO's name of it.
      sizes: of the axes.
    """

    dtype: str
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the array takes without padding; 0 for tokens and other types without a size."""
        return math.prod(self.sizes) * ITEM_BITS.get(self.dtype, 0) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: of its result.
      opcode: what it does.
      shapes: of its results; of a start instruction, operands come first.
      operands: names of what it takes.
      arguments: what stands in its brackets, as text: a parameter's number.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    @property
    def op_name(self) -> str:
        """Where in the JAX program it comes from."""
        found = OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs: bodies, conditions, branches, fusions."""
        branches = BRANCHES.search(self.attributes)
        others = re.findall(r"%([^\s,]+)", branches[1]) if branches else []
        return CALLED.findall(self.attributes) + others

    @property
    def trips(self) -> int:
        """How often it runs them; 1 where XLA does not know."""
        found = TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a program.

    Attributes:
      kind: one of `COLLECTIVES`.
      num_bytes: of the whole array on one device: what is reduced, or what was gathered.
      largest_bytes: of the largest array in it; XLA puts several into one.
      dtypes: of the arrays, by HLO's names.
      runs: how often a step runs it.
      overlapped_flops: of products between its start and its done.
      overlapped_kernels: fusions and library calls between them.
      op_name: where in the JAX program it comes from.
    """

    kind: str
    num_bytes: int
    largest_bytes: int
    dtypes: tuple[str, ...]
    runs: int
    overlapped_flops: float
    overlapped_kernels: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """A product of matrices in a program, with how often a step runs it.

    Attributes:
      op_name: where in the JAX program it comes from.
      flops: of one run; a multiply and an add are two.
      runs: a step.
      matrices: independent products in one run.
    """

    op_name: str
    flops: float
    runs: int
    matrices: int


class Program:
    """A compiled program, as its text says.

    Args:
      text: of the scheduled HLO module.
    """

    def __init__(self, text: str):
        self.entry, self.computations = _parse(text)

    @functools.cached_property
    def products(self) -> list[MatrixProduct]:
        """All products of matrices that a step runs on one device."""
        return [
            MatrixProduct(instruction.op_name, flops, runs, matrices)
            for computation, runs in self._runs().items()
            for instruction in self.computations[computation]
            for flops, matrices in [matrix_product(instruction, self.shapes(computation))]
            if flops
        ]

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """All collectives that a step runs."""
        return [
            collective
            for computation, runs in self._runs().items()
            for collective in self._collectives_of(computation, runs)
        ]

    def flops(self, scope: str | None = None) -> float:
        """Of the products that a step runs on one device: all, or those in one of JAX's named scopes."""
        return math.fsum(work.flops * work.runs for work in self.products if in_scope(work.op_name, scope))

    def _collectives_of(self, computation: str, runs: int) -> Iterator[Collective]:
        instructions = self.computations[computation]
        shapes = self.shapes(computation)
        for at, start in enumerate(instructions):
            kind = start.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            between = _between(instructions, at) if start.opcode.endswith("-start") else []
            arrays = [shape for name in start.operands for shape in shapes.get(name, ())]
            # A collective's bytes are those of its larger end: of an all-gather its results, which a start
            # lists last.
            if kind == "all-gather":
                arrays = list(start.shapes[-len(arrays) :])
            yield Collective(
                kind=kind,
                num_bytes=sum(shape.num_bytes for shape in arrays),
                largest_bytes=max((shape.num_bytes for shape in arrays), default=0),
                dtypes=tuple(sorted({shape.dtype for shape in arrays})),
                runs=runs,
                overlapped_flops=math.fsum(map(self._flops_of(computation), between)),
                overlapped_kernels=sum(map(self._kernels_of, between)),
                op_name=start.op_name,
            )

    def _flops_of(self, computation: str):
        shapes = self.shapes(computation)

        def flops(instruction: Instruction) -> float:
            own, _ = matrix_product(instruction, shapes)
            return own + instruction.trips * math.fsum(
                self._computation_flops(name) for name in instruction.called
            )

        return flops

    @functools.cache  # noqa: B019 (a program lives as long as its report)
    def _computation_flops(self, name: str) -> float:
        return math.fsum(map(self._flops_of(name), self.computations.get(name, ())))

    def _kernels_of(self, instruction: Instruction) -> int:
        if instruction.opcode in ("fusion", "custom-call"):
            return 1
        if instruction.opcode in ("while", "call", "conditional"):
            return instruction.trips * sum(map(self._computation_kernels, instruction.called))
        return 0

    @functools.cache  # noqa: B019
    def _computation_kernels(self, name: str) -> int:
        return sum(map(self._kernels_of, self.computations.get(name, ())))

    @functools.cache  # noqa: B019
    def shapes(self, computation: str) -> Mapping[str, tuple[Shape, ...]]:
        """Of the results of a computation's instructions, by name."""
        return {instruction.name: instruction.shapes for instruction in self.computations[computation]}

    @functools.cache  # noqa: B019
    def _runs(self) -> dict[str, int]:
        """How often each computation is run in a step."""
        runs: Counter[str] = Counter({self.entry: 1})
        for name in self.in_order():
            for instruction in self.computations[name]:
                for called in instruction.called:
                    runs[called] += runs[name] * instruction.trips
        return {name: runs[name] for name in self.computations if runs[name]}

    def in_order(self) -> list[str]:
        """Computations, each behind all that call it."""
        done: dict[str, None] = {}

        def visit(name: str) -> None:
            if name in done or name not in self.computations:
                return
            for instruction in self.computations[name]:
                for called in instruction.called:
                    visit(called)
            done[name] = None

        visit(self.entry)
        return list(reversed(done))


def in_scope(op_name: str, scope: str | None) -> bool:
    """Whether an instruction comes from one of JAX's named scopes; None is all of the program."""
    return scope is None or scope in re.split(r"[/()]", op_name)  # jvp(loss)/while/body


def _parse(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    entry, current = "", []
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            current = computations[found[2]] = []
            entry = found[2] if found[1] else entry
        elif found := INSTRUCTION.match(line):
            current.append(_instruction(found[1], line[found.end() :]))
    return entry, computations


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, rest = text[end:].lstrip().split("(", 1)
    close = _closing("(" + rest, 0) - 1
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=_arrays(text[:end]),
        operands=tuple(re.findall(r"%([^\s,)]+)", rest[:close])),
        arguments=rest[:close],
        attributes=rest[close + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def _arrays(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in ARRAY.findall(text)
    )


def _between(instructions: list[Instruction], start: int) -> list[Instruction]:
    """What is scheduled from the start of a collective to its done."""
    name = instructions[start].name
    for at in range(start + 1, len(instructions)):
        if instructions[at].opcode.endswith("-done") and name in instructions[at].operands:
            return instructions[start + 1 : at]
    return []


def matrix_product(instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]) -> tuple[float, int]:
    """FLOPs of a product of matrices, and how many matrices it makes; zeros for anything else.

    Args:
      instruction: of a computation.
      shapes: of the results of that computation's instructions.
    """
    attributes = instruction.attributes
    operands = [shapes[name][0].sizes for name in instruction.operands if shapes.get(name)]
    if instruction.opcode == "custom-call" and GROUPED_PRODUCT in attributes:
        # Groups share the rows: the number of groups is a factor of one of the three arrays alone.
        sizes = [*operands[:2], instruction.shapes[0].sizes]
        groups = next(size[0] for size in sizes if len(size) == 3)
        return 2 * math.sqrt(math.prod(map(math.prod, sizes)) / groups), groups
    if instruction.opcode == "dot":
        contracted = CONTRACTED.search(attributes)
    elif instruction.opcode == "custom-call" and LIBRARY_PRODUCT.search(attributes):
        contracted = BACKEND_CONTRACTED.search(attributes)
    else:
        return 0.0, 0
    dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
    out = instruction.shapes[0].sizes
    depth = math.prod(operands[0][dim] for dim in dims)
    return 2.0 * math.prod(out) * depth, math.prod(out[:-2])


def largest_buffers(report: str, count: int) -> list[tuple[int, str]]:
    """The largest buffers in XLA's report of memory: bytes, and the values that share each.

    Args:
      report: text of its "memory-usage-report".
      count: how many.
    """
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    row = re.compile(
        r"^\s*[\d.]+\w+\(\s*\d+%\);\s+([\d.]+)(B|KiB|MiB|GiB|TiB);\s+\d+;\s+\d+; (.*)$", re.MULTILINE
    )
    rows = [(int(float(size) * units[unit]), values) for size, unit, values in row.findall(report)]
    return sorted(rows, reverse=True)[:count]
