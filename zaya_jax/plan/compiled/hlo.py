"""Parser of a compiled program: products, collectives, and what is scheduled while a collective is in flight.

The text of a scheduled HLO module lists each computation's instructions in the order in which they start. An
asynchronous collective is a pair of start and done; instructions between them overlap with it.
"""

import dataclasses
import functools
import graphlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8, "bf16": 16, "f16": 16,
    "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
# A computation starts in the first column, and its instructions are indented.
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
    """Type of an array.

    Attributes:
      dtype: HLO's name of the element type.
      sizes: sizes of the axes.
    """

    dtype: str
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array without padding; 0 for tokens and other types without a size."""
        return math.prod(self.sizes) * ITEM_BITS.get(self.dtype, 0) // 8


def total_bytes(shapes: Iterable[Shape]) -> int:
    """Returns the bytes of several arrays."""
    return sum(shape.num_bytes for shape in shapes)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: name of its result.
      opcode: HLO opcode.
      shapes: types of its results; a start instruction lists its operands first.
      operands: names of its operands.
      arguments: text in its parentheses, such as the number of a parameter.
      attributes: rest of the line.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    @property
    def op_name(self) -> str:
        """Its place in the JAX program."""
        matched = OP_NAME.search(self.attributes)
        return matched[1] if matched else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls: bodies, conditions, branches, fusions."""
        branches = BRANCHES.search(self.attributes)
        others = re.findall(r"%([^\s,]+)", branches[1]) if branches else []
        return CALLED.findall(self.attributes) + others

    @property
    def trips(self) -> int:
        """Number of times that it runs them; 1 if XLA does not know."""
        matched = TRIP_COUNT.search(self.attributes)
        return int(matched[1]) if matched else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a program.

    Attributes:
      kind: one of `COLLECTIVES`.
      num_bytes: bytes of the whole message on one device: the input of a reduction, the output of a gather.
      largest_bytes: bytes of its largest array; XLA combines several into one collective.
      dtypes: HLO's names of the arrays' types.
      runs: number of runs per step.
      overlapped_flops: FLOPs of products between its start and done.
      overlapped_kernels: number of fusions and library calls between them.
      op_name: its place in the JAX program.
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
    """A matrix product of a program.

    Attributes:
      op_name: its place in the JAX program.
      flops: FLOPs of one run; a multiply-add counts as two.
      runs: number of runs per step.
      matrices: independent products in one run.
    """

    op_name: str
    flops: float
    runs: int
    matrices: int


class Program:
    """A compiled program, parsed from its text.

    Args:
      text: text of the scheduled HLO module.
    """

    def __init__(self, text: str):
        self.entry, self.computations = _parse(text)

    @functools.cached_property
    def products(self) -> list[MatrixProduct]:
        """All matrix products that a step runs on one device."""
        return [
            MatrixProduct(instruction.op_name, flops, runs, matrices)
            for computation, runs in self.runs().items()
            for instruction in self.computations[computation]
            # A list of one element binds both names within the comprehension.
            for flops, matrices in [matrix_product(instruction, self.shapes(computation))]
            if flops
        ]

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """All collectives that a step runs."""
        return [
            collective
            for computation, runs in self.runs().items()
            for collective in self._collectives_of(computation, runs)
        ]

    def flops(self, scope: str | None = None) -> float:
        """FLOPs of the products that a step runs on one device, in total or in one of JAX's named scopes."""
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
                num_bytes=total_bytes(arrays),
                largest_bytes=max((shape.num_bytes for shape in arrays), default=0),
                dtypes=tuple(sorted({shape.dtype for shape in arrays})),
                runs=runs,
                overlapped_flops=math.fsum(self._flops_of(each, computation) for each in between),
                overlapped_kernels=sum(map(self._kernels_of, between)),
                op_name=start.op_name,
            )

    def _flops_of(self, instruction: Instruction, computation: str) -> float:
        own, _ = matrix_product(instruction, self.shapes(computation))
        return own + instruction.trips * math.fsum(map(self._computation_flops, instruction.called))

    @functools.cache  # noqa: B019 (a program lives as long as its report)
    def _computation_flops(self, name: str) -> float:
        return math.fsum(self._flops_of(each, name) for each in self.computations.get(name, ()))

    def _kernels_of(self, instruction: Instruction) -> int:
        # On a GPU each fusion and each library call is a separate kernel.
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
        """Types of the results of a computation's instructions, by name."""
        return {instruction.name: instruction.shapes for instruction in self.computations[computation]}

    @functools.cache  # noqa: B019
    def runs(self, callers: Collection[str] | None = None) -> dict[str, int]:
        """Number of runs of each computation per step, of those that run.

        Args:
          callers: opcodes whose calls count; None for all.
        """
        runs: Counter[str] = Counter({self.entry: 1})
        # Callers come before what they call, so that the number of their runs is final here.
        for name in self._callers_first:
            for instruction in self.computations[name]:
                if callers is None or instruction.opcode in callers:
                    for called in instruction.called:
                        runs[called] += runs[name] * instruction.trips
        # Computations that the entry does not reach never run.
        return {name: runs[name] for name in self.computations if runs[name]}

    @functools.cached_property
    def _callers_first(self) -> list[str]:
        called = {name: {c for one in body for c in one.called} for name, body in self.computations.items()}
        order = [*graphlib.TopologicalSorter(called).static_order()]
        return [name for name in reversed(order) if name in self.computations]


def in_scope(op_name: str, scope: str | None) -> bool:
    """Whether an instruction belongs to one of JAX's named scopes; None means the whole program."""
    return scope is None or scope in re.split(r"[/()]", op_name)  # jvp(loss)/while/body


def _parse(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    entry, current = "", []
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if matched := COMPUTATION.match(line):
            current = computations[matched[2]] = []
            entry = matched[2] if matched[1] else entry
        elif matched := INSTRUCTION.match(line):
            current.append(_instruction(matched[1], line[matched.end() :]))
    return entry, computations


def _instruction(name: str, text: str) -> Instruction:
    # A tuple type is in parentheses and contains spaces; other types end at the first space.
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    # The rest of the line is: opcode(operands), attributes.
    opcode, rest = text[end:].lstrip().split("(", 1)
    # The split above removed the parenthesis that opens the operands.
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
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for matched in re.compile(r"[()]").finditer(text, start):
        depth += 1 if matched[0] == "(" else -1
        if depth == 0:
            return matched.start()
    return len(text) - 1


def _arrays(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in ARRAY.findall(text)
    )


def _between(instructions: list[Instruction], start: int) -> list[Instruction]:
    """Instructions scheduled between the start and the done of a collective."""
    name = instructions[start].name
    for at in range(start + 1, len(instructions)):
        if instructions[at].opcode.endswith("-done") and name in instructions[at].operands:
            return instructions[start + 1 : at]
    return []


def matrix_product(instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]) -> tuple[float, int]:
    """Returns the FLOPs of a matrix product and the number of matrices; zeros for other instructions.

    Args:
      instruction: instruction of a computation.
      shapes: types of the results of that computation's instructions.
    """
    attributes = instruction.attributes
    operands = [shapes[name][0].sizes for name in instruction.operands if shapes.get(name)]
    if instruction.opcode == "custom-call" and GROUPED_PRODUCT in attributes:
        # The groups share the rows, so the number of groups is a factor of only one of the three arrays.
        sizes = [*operands[:2], instruction.shapes[0].sizes]
        groups = next(size[0] for size in sizes if len(size) == 3)
        # The sizes of the arrays [a, b], [b, c] and [a, c] have the product (a b c)², whichever axis is
        # contracted.
        return 2 * math.sqrt(math.prod(map(math.prod, sizes)) / groups), groups
    if instruction.opcode == "dot":
        # A dot names its contracted axes in its attributes.
        contracted = CONTRACTED.search(attributes)
    elif instruction.opcode == "custom-call" and LIBRARY_PRODUCT.search(attributes):
        # A library call has them in the JSON of its backend config.
        contracted = BACKEND_CONTRACTED.search(attributes)
    else:
        return 0.0, 0
    # A product without contracted axes is an outer product.
    dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
    out = instruction.shapes[0].sizes
    depth = math.prod(operands[0][dim] for dim in dims)
    # All axes of the result before the last two count matrices of a batch.
    return 2.0 * math.prod(out) * depth, math.prod(out[:-2])


def largest_buffers(report: str, count: int) -> list[tuple[int, str]]:
    """Returns the largest buffers in XLA's memory report: bytes, and the values that share each buffer.

    Args:
      report: text of its "memory-usage-report".
      count: number of buffers.
    """
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    row = re.compile(
        r"^\s*[\d.]+\w+\(\s*\d+%\);\s+([\d.]+)(B|KiB|MiB|GiB|TiB);\s+\d+;\s+\d+; (.*)$", re.MULTILINE
    )
    rows = [(int(float(size) * units[unit]), values) for size, unit, values in row.findall(report)]
    return sorted(rows, reverse=True)[:count]
