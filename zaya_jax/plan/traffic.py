"""Bytes that a compiled program's kernels take from memory and put there.

Each kernel counts what it reads and writes once; a cache between two kernels is not considered. Of an
array of which a kernel reads a slice, as of the weights of one layer among all, the slice counts; where
a kernel writes a slice into an array that stays where it is, the slice counts too.
"""

import math
from collections import Counter
from collections.abc import Mapping

from zaya_jax.plan.hlo import Instruction, Program, Shape, in_scope

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "while", "conditional", "call", "async-start",
    "async-update", "async-done",
}  # fmt: skip
"""Opcodes that move nothing by themselves."""
SLICES = ("dynamic-slice", "slice", "gather")


def moved_bytes(program: Program, scope: str | None = None) -> float:
    """Bytes that a step moves on one device, to and from memory: all, or those of a named scope."""
    return math.fsum(
        runs * instruction_bytes(program, instruction, name)
        for name, runs in launched(program).items()
        for instruction in program.computations[name]
        if in_scope(instruction.op_name, scope)
    )


def instruction_bytes(program: Program, instruction: Instruction, computation: str) -> float:
    """Bytes that one instruction of a computation moves; 0 for those that are no kernels."""
    return _moved(program, instruction, program.shapes(computation))


def launched(program: Program) -> dict[str, int]:
    """How often each computation runs whose instructions are kernels of their own."""
    runs: Counter[str] = Counter({program.entry: 1})
    for name in program.in_order():
        for instruction in program.computations[name] if runs[name] else ():
            if instruction.opcode in ("while", "conditional", "call"):
                for called in instruction.called:
                    runs[called] += runs[name] * instruction.trips
    return {name: count for name, count in runs.items() if name in program.computations}


def _moved(program: Program, instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]) -> float:
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0.0
    operands = [_size(shapes.get(name, ())) for name in instruction.operands]
    if instruction.opcode == "fusion":
        return _of_fusion(program.computations[instruction.called[0]], operands)
    written = float(_size(instruction.shapes))
    if instruction.opcode.endswith("-start"):  # its result repeats its operands
        return written
    if instruction.opcode in SLICES:
        # The slice is read and written; the array that it is cut from is not read.
        return 2 * written
    if instruction.opcode == "dynamic-update-slice":
        # In place: the update is read and written, and the array around it stays where it is.
        return 2.0 * operands[1]
    return sum(operands) + written


def _of_fusion(fused: list[Instruction], operands: list[int]) -> float:
    named = {instruction.name: instruction for instruction in fused}
    roots = _through_bitcasts(fused[-1], named)
    moved = float(sum(_written(root, named) for root in roots))
    parameters = [instruction for instruction in fused if instruction.opcode == "parameter"]
    for parameter in parameters:
        number = int(parameter.arguments)
        moved += min(operands[number], _read(parameter.name, fused, roots))
    return moved


def _read(name: str, fused: list[Instruction], roots: list[Instruction]) -> float:
    """Bytes of a value that a fusion reads; what it replaces in place is not read."""
    total = 0.0
    for user in fused:
        if name not in user.operands:
            continue
        if user.opcode in SLICES and user.operands[0] == name:
            total += _size(user.shapes)
        elif user.opcode == "bitcast":
            total += _read(user.name, fused, roots)
        elif user.opcode != "dynamic-update-slice" or user not in roots or user.operands[0] != name:
            # Something reads all of it; the caller then counts the whole operand.
            return float("inf")
    return total


def _written(root: Instruction, named: Mapping[str, Instruction]) -> int:
    if root.opcode == "dynamic-update-slice":
        return _size(named[root.operands[1]].shapes)
    return _size(root.shapes)


def _through_bitcasts(root: Instruction, named: Mapping[str, Instruction]) -> list[Instruction]:
    """What a fusion puts out: the root, or what is in it if it is a tuple."""
    if root.opcode == "tuple":
        return [found for name in root.operands for found in _through_bitcasts(named[name], named)]
    while root.opcode == "bitcast":
        root = named[root.operands[0]]
    return [root]


def _size(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.num_bytes for shape in shapes)
