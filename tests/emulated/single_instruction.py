"""Runs one instruction in the emulator and compares all registers with what AMD's pseudocode says."""

import math

import float_bits
import numpy as np
from instances import EXEC, LANES, Instance
from memory_instances import DEVICE
from tinygrad.runtime.autogen.amd.cdna import ins

from pallas_kernels.emulator import Buffer, Emulator, KernelCode, KernelLaunch
from pallas_kernels.emulator.instruction import Operand

ALL_LANES = np.ones((1, 64), bool)
FIRST_WAVE = np.zeros(1, np.int64), np.zeros(1, np.int64)
"""Workgroup and wave of an access to local memory."""
TOLERANCES = {
    "v_exp_f32": "one unit of the last place; denormal arguments and results may be flushed",
    "v_log_f32": "one unit of the last place; denormal arguments may be flushed",
    "v_rcp_f32": "one unit of the last place; denormal arguments and results may be flushed",
    "v_rcp_iflag_f32": "as v_rcp_f32",
    "v_rsq_f32": "one unit of the last place; denormal arguments may be flushed",
    "v_sqrt_f32": "one unit of the last place; denormal arguments may be flushed",
}
"""Instructions whose result the document defines by a bound."""
FREEDOMS = {
    "NaN": "sign and payload of a NaN that arithmetic produces",
    "16 bits": "the upper half of the result: 0 on gfx9 (LLVM's zeroesHigh16BitsOfDest)",
    "omod": "has no effect while denormal numbers are on, as in our kernels; the compiler never emits it",
    "clamp": "whether -0 becomes +0: it does here",
    "s_bfe": "widths of 32 and more, where the formula shifts 1 beyond the register",
    "v_div_scale_f32": "D0 where nothing is scaled: S0; a quotient that rounds to zero counts as denormal",
    "v_div_fmas_f32": "the text's 2**32 cannot undo 2**64; see test_division_is_correctly_rounded",
    "v_div_fixup_f32": "UNDERFLOW_F32 and OVERFLOW_F32 have no value: 0 and infinity; the NaN of the "
    "intermediate steps of a quotient that overflows is kept",
    "v_rndne_f32": "the text rounds 0.49999997 to 1; to nearest with ties to even is meant",
    "v_fract_f32": "the text gives 1 for tiny negative numbers; the result is below 1",
    "v_pk_mov_b32": "the text reads upper halves beyond the 32 bits that it names",
    "buffer_": "an access that crosses the end of a buffer; the compiler aligns them",
    "ds_swizzle_b32": "prose instead of a formula; the modes FFT and rotate are refused by the emulator",
    "v_mfma": "the order of the additions and denormal operands: test_matrix_layouts.py has exact products",
    "xf32": "no text; whether operands are rounded or cut to 10 bits of mantissa",
}
"""What the document leaves open or states wrongly, and what is tested instead."""


def machine_of(instance: Instance) -> Emulator:
    """A machine with the registers of an instance, ready to run it."""
    code = instance.code + ins.s_waitcnt(simm16=0).to_bytes() + ins.s_endpgm().to_bytes()
    buffers = []
    if instance.device:
        words = np.array(instance.device, np.uint32)
        buffers = [Buffer(words, writable=instance.after_device is not None)]
    machine = Emulator(
        KernelCode("instructions", code), KernelLaunch(lds_bytes=4 * len(instance.local)), buffers
    )
    assert all(address == DEVICE for address in machine.memory.addresses)
    for start in range(0, len(instance.local), 64):
        values = np.array([instance.local[start : start + 64]], np.uint32)
        addresses = 4 * np.arange(start, start + 64)[None]
        touched = machine.local.store(addresses, ALL_LANES, [values], 4, *FIRST_WAVE)
        machine.local.complete(touched, np.array([0]))
    for number, values in instance.vectors.items():
        if number < len(machine.registers.vector):
            machine.registers.write32(number, np.array([values], np.uint32), ALL_LANES)
    for number, value in instance.scalars.items():
        machine.registers.write_scalar32(Operand("scalar", number), np.array([value], np.uint32))
    machine.registers.scc[:] = bool(instance.scc)
    return machine


def differences(instance: Instance, machine: Emulator) -> list[str]:
    """What differs from the expected registers after a run, as messages."""
    messages = []
    for number in range(len(machine.registers.vector)):
        before = instance.vectors.get(number)
        expected = instance.after_vectors.get(number, before)
        if expected is None:
            continue
        actual = machine.registers.vector[number, 0].tolist()
        for lane in LANES:
            if not agrees(instance, number, lane, actual[lane], expected[lane]):
                inputs = [f"{x:#x}" for x in instance.inputs[lane]] if instance.inputs else ""
                messages.append(
                    f"v{number} lane {lane}: {actual[lane]:#x}, not {expected[lane]:#x}; {inputs}"
                )
    for number, before in instance.scalars.items() | instance.after_scalars.items():
        expected = instance.after_scalars.get(number, before)
        actual = int(machine.registers.scalar[number, 0])
        if actual != expected:
            messages.append(f"s{number}: {actual:#x}, not {expected:#x}")
    messages += memory_differences(instance, machine)
    expected_scc = instance.scc if instance.after_scc is None else instance.after_scc
    if bool(machine.registers.scc[0]) != bool(expected_scc):
        messages.append(f"SCC: {machine.registers.scc[0]}, not {expected_scc}")
    return messages


def memory_differences(instance: Instance, machine: Emulator) -> list[str]:
    messages = []
    for start in range(0, len(instance.local), 64):
        addresses = 4 * np.arange(start, start + 64)[None]
        (words,), _ = machine.local.load(addresses, ALL_LANES, 4, *FIRST_WAVE)
        for i, expected in enumerate(instance.after_local[start : start + 64]):
            if words[0, i] != expected:
                messages.append(f"local memory {4 * (start + i):#x}: {words[0, i]:#x}, not {expected:#x}")
    if instance.after_device is not None:
        actual = machine.memory.outputs()[0]
        for i, expected in enumerate(instance.after_device):
            if actual[i] != expected:
                messages.append(f"device memory {4 * i:#x}: {actual[i]:#x}, not {expected:#x}")
    return messages


def agrees(instance: Instance, number: int, lane: int, actual: int, expected: int) -> bool:
    """Whether a lane of a register has the expected bits, or ones that the document allows instead."""
    if actual == expected:
        return True
    if number not in instance.floats or not is_active(instance, lane):
        return False
    if instance.name in TOLERANCES:
        return approximates(instance, lane, actual, expected)
    width = instance.float_width
    return float_bits.is_nan(expected, width) and float_bits.is_nan(actual, width)


def is_active(instance: Instance, lane: int) -> bool:
    return bool(instance.scalars[EXEC + lane // 32] >> lane % 32 & 1)


EXACT = {
    "v_exp_f32": lambda x: 2.0**x,
    "v_log_f32": math.log2,
    "v_rcp_f32": lambda x: 1.0 / x,
    "v_rcp_iflag_f32": lambda x: 1.0 / x,
    "v_rsq_f32": lambda x: 1.0 / math.sqrt(x),
    "v_sqrt_f32": math.sqrt,
}
"""Functions with a bound, in float64."""
OF_ZERO = {"v_exp_f32": 1.0, "v_log_f32": -math.inf, "v_rcp_f32": math.inf, "v_rcp_iflag_f32": math.inf}
OF_ZERO |= {"v_rsq_f32": math.inf, "v_sqrt_f32": 0.0}
"""What they return for a denormal argument that is flushed, but for its sign."""


def approximates(instance: Instance, lane: int, actual: int, expected: int) -> bool:
    """Whether the result of a function that the document defines by a bound is within it."""
    argument = instance.inputs[lane][0]
    if float_bits.is_nan(actual, 32):
        return float_bits.is_nan(expected, 32)
    value = float_bits.to_float(actual, 32)
    if float_bits.is_denormal(argument, 32) and abs(value) == abs(OF_ZERO[instance.name]):
        return True
    if float_bits.is_nan(expected, 32) or not math.isfinite(float_bits.to_float(expected, 32)):
        return False
    if float_bits.is_denormal(expected, 32) and value == 0:
        return True
    exact = EXACT[instance.name](float_bits.to_float(argument, 32))
    return math.isfinite(value) and float_bits.ulps_apart(actual, exact) <= 1
