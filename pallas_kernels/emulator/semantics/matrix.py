"""Matrix instructions (MFMA): D = A B + C of a wave, with factors and results spread over its lanes.

Sources: CDNA3 instruction set architecture, section "Matrix arithmetic instructions", and AMD's matrix
instruction calculator. For M x N x K with one block, lane l holds row or column l mod M of a factor and, of
K, the `K M / 64` entries from `(l div M) K M / 64` on. Of the result, register r of lane l holds column l
mod N and row `8 (r div 4) + 4 (l div 32) + r mod 4` for M = 32 and `4 (l div 16) + r` for M = 16.

The ISA does not specify the order and the intermediate precision of the sum over K: here products are exact
and summed in float64, and the sum with C is rounded once. Factors of xf32 instructions are rounded to 10
bits of mantissa, to nearest, which is an assumption too. EXEC is ignored, as on the hardware.
"""

import re
from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import unknown
from pallas_kernels.emulator.instruction import GpuInstruction, Operand
from pallas_kernels.emulator.registers import LANES
from pallas_kernels.emulator.state import LaunchState

NAME = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?(bf16|f16|f32|xf32)(?:_1k)?")
LANE = np.arange(LANES)
XF32_HALF, XF32_MASK = np.uint32(0x1000), np.uint32(0xFFFFE000)


def multiply_add(instruction: GpuInstruction) -> Callable[[LaunchState], None]:
    """Behavior of a matrix instruction of one block.

    Raises:
      EmulationError: if it, or a modifier, is unknown.
    """
    match = NAME.fullmatch(instruction.name)
    shapes = {(32, 32), (16, 16)}
    has_modifiers = any(instruction.fields[name] for name in ("cbsz", "abid", "blgp"))
    if not match or has_modifiers or (int(match[1]), int(match[2])) not in shapes:
        raise unknown(instruction.text)
    size, inner, kind = int(match[1]), int(match[3]), match[4]
    left, right, addend = instruction.sources
    destination = instruction.destinations[0]
    # Several small products in one instruction (blocks) would not satisfy this.
    if _entries_of_lane(left.count, kind) * LANES != size * inner:
        raise unknown(f"the blocks of {instruction.text}")
    # The layout is computed once for each instruction of the code, not for each execution.
    rows, columns = result_layout(size, destination.count)

    def run(state: LaunchState) -> None:
        a = _factor(state, left, kind, size)  # [n, M, K]
        b = _factor(state, right, kind, size)  # [n, N, K]
        product = np.matmul(a, b.swapaxes(1, 2))[:, rows, columns]  # [n, registers, 64]
        total = product + _addend(state, addend)
        bits = total.astype(np.float32).view(np.uint32)
        # EXEC does not matter: every lane receives its part of the result.
        everywhere = np.ones((state.registers.count, LANES), bool)
        for number in range(destination.count):
            state.registers.write32(destination.register + number, bits[:, number], everywhere)

    return run


def result_layout(size: int, num_registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the result in each register and lane, both [registers, 64]."""
    register = np.arange(num_registers)[:, None]
    if size == 32:
        rows = 8 * (register // 4) + 4 * (LANE // 32) + register % 4
    else:
        rows = 4 * (LANE // 16) + register
    return rows, np.broadcast_to(LANE % size, rows.shape)


def _entries_of_lane(num_registers: int, kind: str) -> int:
    return num_registers * (2 if kind in ("bf16", "f16") else 1)


def _factor(state: LaunchState, operand: Operand, kind: str, size: int) -> np.ndarray:
    """Entries of a factor, [n, size, K], float64."""
    words = [state.registers.vector32(operand.register + number) for number in range(operand.count)]
    bits = np.ascontiguousarray(np.stack(words, axis=-1))  # [n, 64, registers]
    if kind == "bf16":
        # bfloat16 is the upper half of a float32.
        entries = (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif kind == "f16":
        entries = bits.view(np.float16)
    elif kind == "xf32":
        entries = (bits + XF32_HALF & XF32_MASK).view(np.float32)
    else:
        entries = bits.view(np.float32)
    count, _, per_lane = entries.shape
    blocks = LANES // size
    # Lane = block * size + index: the blocks hold consecutive parts of K.
    ordered = entries.reshape(count, blocks, size, per_lane).swapaxes(1, 2)
    return ordered.reshape(count, size, blocks * per_lane).astype(np.float64)


def _addend(state: LaunchState, operand: Operand) -> np.ndarray:
    if operand.kind == "constant":
        return np.array(operand.value & 0xFFFFFFFF, np.uint32).view(np.float32)
    words = [state.registers.vector32(operand.register + number) for number in range(operand.count)]
    return np.stack(words, axis=1).view(np.float32)
