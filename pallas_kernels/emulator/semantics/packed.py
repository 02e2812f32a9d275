"""Instructions on pairs of float32 numbers in two registers (VOP3P).

Source: CDNA3 instruction set architecture, chapter "VOP3P". op_sel chooses for the lower result, and
op_sel_hi for the upper one, which register of each source's pair is read.
"""

from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import EmulationError, unknown
from pallas_kernels.emulator.instruction import GpuInstruction, Operand
from pallas_kernels.emulator.semantics.floats import fma
from pallas_kernels.emulator.state import LaunchState

FORMULAS: dict[str, Callable] = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": fma,
}
SIGN = np.uint32(0x80000000)


def packed(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """Behavior of a packed instruction.

    Raises:
      EmulationError: if it, or a modifier, is unknown.
    """
    name, fields, sources = instruction.name, instruction.fields, instruction.sources
    if fields["clmp"] or name not in (*FORMULAS, "v_pk_mov_b32"):
        raise unknown(instruction.text)
    # The third bit of op_sel_hi is in a field of its own.
    low, high = fields["opsel"], fields["opsel_hi"] | fields["opsel_hi2"] << 2
    destination = instruction.destinations[0]

    def half(state: LaunchState, choices: int, signs: int) -> list[np.ndarray]:
        bits = [_half(state, source, choices >> n & 1) for n, source in enumerate(sources)]
        return [value ^ SIGN if signs >> n & 1 else value for n, value in enumerate(bits)]

    def compute(state: LaunchState) -> None:
        formula = FORMULAS[name]
        lower = [bits.view(np.float32) for bits in half(state, low, fields["neg"])]
        upper = [bits.view(np.float32) for bits in half(state, high, fields["neg_hi"])]
        _write(state, destination, formula(*lower), formula(*upper))

    def move(state: LaunchState) -> None:
        # The first source gives the lower result, the second the upper one; both are chosen by op_sel.
        lower, upper = half(state, low, 0)[:2]
        _write(state, destination, lower, upper)

    return move if name == "v_pk_mov_b32" else compute


def _half(state: LaunchState, source: Operand, part: int) -> np.ndarray:
    if source.kind == "vector":
        return state.registers.vector32(source.register + part)
    # The ISA does not say whether the upper half of an inline constant repeats it or extends it. That of
    # zero, which the compiler of jax 0.12 adds, is zero in either case.
    if source.kind == "constant" and part:
        if state.registers.scalar32(source, 0).any():
            raise EmulationError("instruction", "the upper half of a constant is not defined")
        part = 0
    return state.registers.scalar32(source, part)[:, None]


def _write(state: LaunchState, destination: Operand, lower: np.ndarray, upper: np.ndarray) -> None:
    # Both are read before either is written: the destination may be a source. A move's halves are views.
    upper = upper.copy()
    state.registers.write32(destination.register, np.ascontiguousarray(lower).view(np.uint32))
    state.registers.write32(destination.register + 1, np.ascontiguousarray(upper).view(np.uint32))
