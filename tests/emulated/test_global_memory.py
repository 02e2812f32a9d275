"""Device memory of a launch: what arguments share, and what may be read and added."""

import numpy as np
import pytest

from pallas_kernels.emulator import Buffer, EmulationError
from pallas_kernels.emulator.global_memory import GlobalMemory

LANES = np.ones((1, 64), bool)
GROUP = np.zeros(1, np.int64)


def memory_of(*buffers):
    return GlobalMemory(buffers, 8 * len(buffers), check=True)


def addresses(memory, number, words):
    return memory.addresses[number] + 4 * np.asarray(words, np.int64)[None]


def test_one_buffer_may_be_several_arguments():
    shared, other = (Buffer(np.zeros(64, np.float32), writable=True) for _ in range(2))
    memory = memory_of(shared, other, shared)
    assert memory.addresses[0] == memory.addresses[2] != memory.addresses[1]
    memory.store(addresses(memory, 2, range(64)), LANES, [np.full((1, 64), 7, np.uint32)], 4, GROUP)
    first, second = memory.outputs()
    assert (first.view(np.uint32) == 7).all()
    assert not second.any()


@pytest.mark.parametrize("initialized", [False, True])
def test_contents_of_a_writable_buffer(initialized):
    memory = memory_of(Buffer(np.arange(64, dtype=np.uint32), writable=True, initialized=initialized))
    assert memory.unwritten() == [0 if initialized else 256]
    if initialized:
        (loaded,) = memory.load(addresses(memory, 0, range(64)), LANES, 4, GROUP)
        np.testing.assert_array_equal(loaded[0], np.arange(64))
    else:
        with pytest.raises(EmulationError, match="never written"):
            memory.load(addresses(memory, 0, range(64)), LANES, 4, GROUP)


def atomic_buffer():
    return memory_of(Buffer(np.zeros(64, np.float32), writable=True, initialized=True))


def test_atomics_add_all_lanes_and_workgroups():
    memory = atomic_buffer()
    numbers = np.arange(64, dtype=np.float32)[None].view(np.uint32)
    for _ in range(2):
        memory.add_floats(addresses(memory, 0, np.arange(64) % 2), LANES, numbers)
    (total,) = memory.outputs()
    # Sums of the even and of the odd numbers below 64, twice.
    np.testing.assert_array_equal(total[:3], [1984, 2048, 0])


def test_nothing_orders_atomics_with_loads_and_stores():
    ones = np.ones((1, 64), np.uint32)
    for access in ("load", "store"):
        memory = atomic_buffer()
        at = addresses(memory, 0, range(64))
        arguments = (at, LANES, 4, GROUP) if access == "load" else (at, LANES, [ones], 4, GROUP)
        getattr(memory, access)(*arguments)
        with pytest.raises(EmulationError, match="atomic") as error:
            memory.add_floats(at, LANES, ones)
        assert error.value.check == "workgroup race"
        memory = atomic_buffer()
        memory.add_floats(addresses(memory, 0, range(64)), LANES, ones)
        arguments = (addresses(memory, 0, range(64)), *arguments[1:])
        with pytest.raises(EmulationError) as error:
            getattr(memory, access)(*arguments)
        assert error.value.check == "workgroup race"
