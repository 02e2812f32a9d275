"""Memory traffic of a compiled program's kernels.

Each kernel counts what it reads and writes once; caches between kernels are ignored. If a kernel reads a
slice of an array, such as the weights of one layer, only the slice counts; if it writes a slice in place,
only the slice counts as well. The same holds for rows that a gather reads and those that a scatter changes.
"""

import math
from collections.abc import Mapping

from zaya_jax.plan.compiled.hlo import Instruction, Program, Shape, in_scope, total_bytes

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "while", "conditional", "call", "async-start",
    "async-update", "async-done",
}  # fmt: skip
"""Opcodes that move no data."""
CALLERS = ("while", "conditional", "call")
"""Opcodes that run kernels; a fusion is one kernel, whose computation launches none."""
SLICES = ("dynamic-slice", "slice", "gather")
VIEWS = ("bitcast", "transpose")
"""Opcodes within a fusion that only change where an entry is: what reads their result decides how much is
read."""
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that change a part of an array in place, and the index of the operand with the new part."""
ALLOCATION = 'custom_call_target="AllocateBuffer"'
"""A buffer whose first values do not matter, such as the stack that a loop fills; no kernel writes it."""


def moved_bytes(program: Program, scope: str | None = None) -> float:
    """Bytes that a step moves to and from memory on one device, in total or in a named scope."""
    return math.fsum(
        runs * instruction_bytes(program, instruction, name)
        for name, runs in program.runs(CALLERS).items()
        for instruction in program.computations[name]
        if in_scope(instruction.op_name, scope)
    )


def instruction_bytes(program: Program, instruction: Instruction, computation: str) -> float:
    """Bytes that one instruction of a computation moves; 0 for instructions that are not kernels."""
    return _moved(program, instruction, program.shapes(computation))


def _moved(program: Program, instruction: Instruction, shapes: Mapping[str, tuple[Shape, ...]]) -> float:
    is_free = instruction.opcode in FREE or instruction.opcode.endswith("-done")
    if is_free or ALLOCATION in instruction.attributes:
        return 0.0
    operands = [total_bytes(shapes.get(name, ())) for name in instruction.operands]
    if instruction.opcode == "fusion":
        return _of_fusion(program.computations[instruction.called[0]], operands)
    written = float(total_bytes(instruction.shapes))
    if instruction.opcode.endswith("-start"):  # its results include its operands
        return written
    if instruction.opcode in SLICES:
        # Only the slice is read and written, not the whole array.
        return 2 * written
    if instruction.opcode == "dynamic-update-slice":
        # In place: only the update is read and written.
        return 2.0 * operands[1]
    return sum(operands) + written


def _of_fusion(fused: list[Instruction], operands: list[int]) -> float:
    named = {instruction.name: instruction for instruction in fused}
    roots = _through_bitcasts(fused[-1], named)
    moved = float(sum(_written(root, named) for root in roots))
    parameters = [instruction for instruction in fused if instruction.opcode == "parameter"]
    for parameter in parameters:
        # parameter(2) is the operand of the fusion with index 2; parameters may be listed in any order.
        number = int(parameter.arguments)
        # A fusion never reads more than the operand itself.
        moved += min(operands[number], _read(parameter.name, fused, roots, named))
    return moved


def _read(
    name: str, fused: list[Instruction], roots: list[Instruction], named: Mapping[str, Instruction]
) -> float:
    """Bytes of a value that a fusion reads; parts that it replaces in place are not read."""
    total = 0.0
    for user in fused:
        if name not in user.operands:
            continue
        is_first = user.operands[0] == name
        # Only the first operand is sliced. The others are indices, which are read as a whole.
        if user.opcode in SLICES and is_first:
            total += total_bytes(user.shapes)
        elif user.opcode in VIEWS:
            total += _read(user.name, fused, roots, named)
        elif user.opcode == "scatter" and user in roots and is_first:
            # The sums replace only the entries that have an update.
            total += _update_bytes(user, named)
        elif user.opcode != "dynamic-update-slice" or user not in roots or not is_first:
            # Something reads the whole value; the caller then counts the whole operand.
            return float("inf")
    return total


def _written(root: Instruction, named: Mapping[str, Instruction]) -> int:
    # In place: the rest of the array stays as it is.
    return _update_bytes(root, named) if root.opcode in UPDATES else total_bytes(root.shapes)


def _update_bytes(root: Instruction, named: Mapping[str, Instruction]) -> int:
    return total_bytes(named[root.operands[UPDATES[root.opcode]]].shapes)


def _through_bitcasts(root: Instruction, named: Mapping[str, Instruction]) -> list[Instruction]:
    """Outputs of a fusion: its root, or the elements of a tuple root."""
    if root.opcode == "tuple":
        return [output for name in root.operands for output in _through_bitcasts(named[name], named)]
    while root.opcode == "bitcast":
        root = named[root.operands[0]]
    return [root]
