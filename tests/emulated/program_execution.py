"""Execution of a whole compiled program on the emulator of gfx942.

It follows XLA's own list of thunks and its buffer assignment: kernels are executed as machine code, with the
addresses that XLA would pass; copies, loops and branches are done as XLA's runtime does them.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from buffer_assignment import BufferAssignment, BufferSlice, parse_buffer_assignment
from library_calls import library_product
from thunks import Thunk, parse_thunks

from pallas_kernels.emulator import Buffer, EmulationError, KernelCode, execute, read_code_object
from zaya_jax.plan.compiled.hlo import Instruction, Program, Shape
from zaya_jax.plan.rocm.code_objects import files_in_order

UNWRITTEN = 0xFF
"""Byte that memory consists of before the program writes it: NaN in float types, -1 in integers."""
POINTER_BYTES = 8
DTYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
DTYPES |= {f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
DTYPES |= {f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}
"""Names of element types in HLO and in numpy."""
ROOT = re.compile(r"^  ROOT %(\S+) = ", re.MULTILINE)
CONDITION = re.compile(r"\bcondition=%([^\s,)]+)")
TRUE_COMPUTATION = re.compile(r"\btrue_computation=%([^\s,)]+)")
SLICED = re.compile(r"slice=\{([^}]*)\}")
LAYOUT = re.compile(r"\]\{([\d,]+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledFiles:
    """A compiled program as XLA:ROCm's files describe it.

    Attributes:
      program: its scheduled instructions.
      roots: name of the last instruction of each computation, whose result is the computation's.
      thunks: what it runs.
      memory: where it stores values.
      kernels: machine code by name.
      hlo: text of the program.
    """

    program: Program
    roots: dict[str, str]
    thunks: Sequence[Thunk]
    memory: BufferAssignment
    kernels: dict[str, KernelCode]
    hlo: str


def read_compiled_files(folder: pathlib.Path) -> CompiledFiles:
    """Reads the files of one compilation.

    Args:
      folder: folder of `zaya_jax.plan.rocm.worker`, with the compiler's folders `dump` and `code`.

    Raises:
      ValueError: if the program's arguments or results are not stored in row-major order.
    """

    def text(suffix: str) -> str:
        # A job may compile small programs too; the files of the requested one are the largest.
        files = sorted((folder / "dump").glob(f"*{suffix}"), key=lambda path: path.stat().st_size)
        return files[-1].read_text()

    hlo = text("gpu_after_optimizations.txt")
    _check_layouts(hlo[: hlo.index("\n")].partition("entry_computation_layout=")[2])
    kernels = {}
    # XLA writes one code object for each kernel, and one for the program's constants.
    for path in files_in_order(folder / "code", "*.hsaco"):
        kernels |= read_code_object(path.read_bytes())
    return CompiledFiles(
        program=Program(hlo),
        roots=_roots(hlo),
        thunks=parse_thunks(text(".thunk_sequence.txt"), text(".thunk_metadata.txt")),
        memory=parse_buffer_assignment(
            text("optimizations-buffer-assignment.txt"), text("optimizations-buffer-assignment-values.txt")
        ),
        kernels=kernels,
        hlo=hlo,
    )


def _check_layouts(types: str) -> None:
    """Checks that all arrays of a text of types are stored in row-major order, as those of numpy."""
    for layout in LAYOUT.findall(types):
        order = [int(axis) for axis in layout.split(",")]
        if order != sorted(order, reverse=True):
            raise ValueError(f"an array has the layout {layout}, which is not row-major: {types[:80]}")


def _roots(hlo: str) -> dict[str, str]:
    roots = {}
    # Each computation is a block that starts with its name in the first column.
    for block in re.split(r"^(?=%|ENTRY )", hlo, flags=re.MULTILINE)[1:]:
        name = block.removeprefix("ENTRY ").split(" ", 1)[0].removeprefix("%")
        if root := ROOT.search(block):
            roots[name] = root[1]
    return roots


class ProgramExecution:
    """A compiled program in execution.

    Attributes:
      launches: number of launches of each kernel.
      instructions: executed instructions of all launches, by mnemonic.
      library_calls: number of calls of libraries, which numpy computes.
      unwritten: bytes of its results that a kernel left unwritten, over all launches, by kernel.
    """

    def __init__(self, files: CompiledFiles):
        self.launches: collections.Counter[str] = collections.Counter()
        self.instructions: collections.Counter[str] = collections.Counter()
        self.unwritten: collections.Counter[str] = collections.Counter()
        self.library_calls = 0
        self._files, self._memory = files, files.memory
        self._instructions: dict[str, Instruction] = {
            instruction.name: instruction
            for instructions in files.program.computations.values()
            for instruction in instructions
        }
        # Memory is kept for the results, which are read after the last thunk.
        self._bytes: dict[int, np.ndarray] = {}
        self._copies: collections.Counter[str] = collections.Counter()

    def run(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Executes the program.

        Args:
          arguments: all parameters of the program, in their order.

        Returns:
          The parts of its result.

        Raises:
          EmulationError: if a kernel fails; the message names it.
          ValueError: if the program has something that this class does not know.
        """
        memory = self._memory
        if len(arguments) != len(memory.parameters):
            raise ValueError(f"the program has {len(memory.parameters)} parameters, not {len(arguments)}")
        self._bytes = {number: np.full(size, UNWRITTEN, np.uint8) for number, size in memory.sizes.items()}
        for number, allocation in memory.parameters.items():
            # A donated argument and the result that replaces it are one allocation.
            self._bytes[allocation][:] = _raw(arguments[number])
        for allocation, name in memory.constants.items():
            self._bytes[allocation][:] = _raw(_constant(self._instructions[name]))
        self._run_all(self._files.thunks)
        return self._results()

    def _results(self) -> list[np.ndarray]:
        root = self._instructions[self._files.roots[self._files.program.entry]]
        places = self._memory.results(root.name)
        pairs = zip(places, root.shapes, strict=True)
        return [self._read(place).view(_dtype(shape)).reshape(shape.sizes) for place, shape in pairs]

    def _read(self, place: BufferSlice) -> np.ndarray:
        return self._bytes[place.allocation][place.offset : place.offset + place.size].copy()

    def _write(self, place: BufferSlice, raw: np.ndarray) -> None:
        self._bytes[place.allocation][place.offset : place.offset + place.size] = raw

    def _run_all(self, thunks: Sequence[Thunk]) -> None:
        known = {
            "kCustomKernel": self._launch,
            "kKernel": self._launch,
            "kCopy": self._copy,
            "kWhile": self._loop,
            "kConditional": self._branch,
            "kCublasLtMatmul": self._call_library,
        }
        previous = None
        for thunk in thunks:
            if thunk.kind not in known:
                raise ValueError(f"unknown thunk {thunk.kind} of the instruction {thunk.instruction}")
            # Several thunks may compute one instruction, one after the other.
            if thunk.instruction != previous:
                self._copies.clear()
            known[thunk.kind](thunk)
            previous = thunk.instruction

    def _loop(self, thunk: Thunk) -> None:
        condition = CONDITION.search(self._instructions[thunk.instruction].attributes)
        assert condition
        place = self._memory.slices[self._files.roots[condition[1]], None]
        # XLA may know the number of iterations; the condition says the same.
        while True:
            self._run_all(thunk.parts["condition"])
            if not self._read(place).any():
                return
            self._run_all(thunk.parts["body"])

    def _branch(self, thunk: Thunk) -> None:
        instruction = self._instructions[thunk.instruction]
        names = TRUE_COMPUTATION.search(instruction.attributes)
        if not names or len(thunk.parts) != 2:
            raise ValueError(f"unknown branches {list(thunk.parts)} of {thunk.instruction}")
        # XLA's dump calls the first branch false, though a true predicate chooses it: only the instructions
        # of the computation tell which one it is.
        inside = {each.name for each in self._files.program.computations[names[1]]}
        first, second = thunk.parts.values()
        if not any(each.instruction in inside for each in first):
            first, second = second, first
        is_true = self._read(self._slice_of(instruction.operands[0])).any()
        self._run_all(first if is_true else second)

    def _slice_of(self, operand: str) -> BufferSlice:
        # From jax 0.12 on, "name#index" denotes an entry of a tuple, without an instruction of its own.
        name, _, index = operand.partition("#")
        return self._memory.slices[name, index or None]

    def _operands(self, instruction: Instruction) -> list[BufferSlice]:
        # Kernels and library calls take arrays only: a tuple's parts are operands of their own.
        return [self._slice_of(name) for name in instruction.operands]

    def _copy(self, thunk: Thunk) -> None:
        instruction = self._instructions[thunk.instruction]
        pairs = zip(self._operands(instruction), self._memory.results(instruction.name), strict=False)
        # Before a kernel that works in place, XLA copies those operands that are stored elsewhere.
        moved = [(source, target) for source, target in pairs if source != target]
        source, target = moved[self._copies[instruction.name]]
        self._copies[instruction.name] += 1
        # A copy of a part is a fusion of one slice; all other copies are whole.
        start = self._first_byte(instruction) if source.size != target.size else 0
        self._write(target, self._read(source)[start : start + target.size])

    def _first_byte(self, instruction: Instruction) -> int:
        """First byte that a fusion of one slice copies."""
        (computation,) = instruction.called
        root = self._instructions[self._files.roots[computation]]
        bounds = SLICED.search(root.attributes)
        sizes = self._shape_of(computation, root.operands[0]).sizes
        if root.opcode != "slice" or not bounds:
            raise ValueError(f"unknown copy of {instruction.name}")
        starts = [int(start) for start in re.findall(r"\[(\d+):", bounds[1])]
        # XLA copies a slice only if it is contiguous.
        return int(np.ravel_multi_index(starts, sizes)) * _dtype(root.shapes[0]).itemsize

    def _call_library(self, thunk: Thunk) -> None:
        instruction = self._instructions[thunk.instruction]
        (computation,) = [
            name for name, inside in self._files.program.computations.items() if instruction in inside
        ]
        operands = []
        for name, place in zip(instruction.operands, self._operands(instruction), strict=True):
            defined = re.search(rf"%{re.escape(name)} = ([^ ]*)", self._files.hlo)
            assert defined
            _check_layouts(defined[1])
            shape = self._shape_of(computation, name)
            operands.append(self._read(place).view(_dtype(shape)).reshape(shape.sizes))
        # The second result is the library's workspace.
        self._write(self._memory.results(instruction.name)[0], _raw(library_product(instruction, operands)))
        self.library_calls += 1

    def _shape_of(self, computation: str, name: str) -> Shape:
        return self._files.program.shapes(computation)[name][0]

    def _launch(self, thunk: Thunk) -> None:
        assert thunk.launch
        instruction, kernel = self._instructions[thunk.instruction], self._files.kernels[thunk.kernel]
        operands, results = self._operands(instruction), self._memory.results(instruction.name)
        # What the copies before a kernel have written is an operand too.
        num_copied = self._copies[instruction.name]
        initialized = {*operands, *(results[: len(operands)] if num_copied else [])}
        # XLA passes the addresses of operands and then of results; one that is both is passed twice.
        passed = [*operands, *results]
        if POINTER_BYTES * len(passed) != kernel.kernarg_bytes:
            raise ValueError(
                f"{thunk.kernel} takes {kernel.kernarg_bytes} bytes of arguments, but the instruction "
                f"{thunk.instruction} has {len(passed)} operands and results"
            )
        _check_apart(passed, set(results), thunk)
        buffers = {
            place: Buffer(
                self._read(place) if place in initialized else np.full(place.size, UNWRITTEN, np.uint8),
                writable=place in results,
                initialized=place in initialized,
            )
            for place in passed
        }
        try:
            execution = execute(kernel, thunk.launch, [buffers[place] for place in passed])
        except EmulationError as error:
            error.args = (f"kernel {thunk.kernel} of {thunk.instruction}: {error}",)
            raise
        # The emulator returns writable buffers in the order of their first argument, as the dict keeps them.
        written = [place for place, buffer in buffers.items() if buffer.writable]
        for place, raw in zip(written, execution.outputs, strict=True):
            self._write(place, raw)
        self.launches[thunk.kernel] += 1
        self.instructions.update(execution.counts.instructions)
        if holes := sum(execution.unwritten):
            self.unwritten[thunk.kernel] += holes


def _check_apart(places: Sequence[BufferSlice], results: set[BufferSlice], thunk: Thunk) -> None:
    """Checks that what a kernel writes overlaps nothing else; the emulator's buffers are separate."""
    for place in results:
        for other in places:
            if other != place and other.overlaps(place):
                raise ValueError(f"{thunk.instruction} writes {place}, which overlaps {other}")


def _dtype(shape: Shape) -> np.dtype:
    return np.dtype(jnp.dtype(DTYPES[shape.dtype]))


def _raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _constant(instruction: Instruction) -> np.ndarray:
    """Value of a constant instruction, from its text."""
    (shape,) = instruction.shapes
    # Numbers of several axes are in nested braces; in row-major order the braces say nothing more.
    words = re.findall(r"[^\s{},]+", instruction.arguments)
    numbers = [word == "true" if word in ("true", "false") else float(word) for word in words]
    return np.array(numbers).astype(_dtype(shape)).reshape(shape.sizes)
