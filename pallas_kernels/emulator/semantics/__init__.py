"""What each instruction does: one function for each, found by its name and encoding."""

import functools
from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import EmulationError, unknown
from pallas_kernels.emulator.instruction import GpuInstruction
from pallas_kernels.emulator.semantics import cross_lane, matrix, memory, packed, scalar, vector
from pallas_kernels.emulator.state import LaunchState

# Names first: these instructions share a prefix with others of another kind.
BY_NAME: dict[str, Callable] = {
    "v_readfirstlane_b32": cross_lane.read_first_lane,
    "v_readlane_b32": cross_lane.read_lane,
    "v_writelane_b32": cross_lane.write_lane,
    "ds_bpermute_b32": cross_lane.permute,
    "ds_permute_b32": cross_lane.permute,
    "ds_swizzle_b32": cross_lane.swizzle,
}
# In this order: "v_" is the rest of the vector instructions.
BY_PREFIX: dict[str, Callable] = {
    "s_": scalar.behavior,
    "v_pk_": packed.packed,
    "v_mfma_": matrix.multiply_add,
    "v_": vector.compute,
    "global_": memory.global_access,
    "buffer_": memory.buffer_access,
    "ds_": memory.local_access,
}


def behavior_of(instruction: GpuInstruction) -> Callable[[LaunchState], np.ndarray | None]:
    """Returns the function that executes an instruction for the selected waves of a state.

    Raises:
      EmulationError: if the emulator does not know the instruction or one of its modifiers.
    """
    try:
        return _find(instruction.name)(instruction)
    except EmulationError as error:
        raise error.at(instruction.pc, instruction.text) from None


@functools.cache
def _find(name: str) -> Callable:
    if name in BY_NAME:
        return BY_NAME[name]
    for prefix, build in BY_PREFIX.items():
        if name.startswith(prefix):
            return build
    raise unknown(name)
