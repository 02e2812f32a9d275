"""Executes gfx942 machine code on a CPU: the code objects that XLA:ROCm makes of this project's kernels.

It tests what compilers made of a kernel, without a GPU: the values, and errors that hardware shows only now
and then, such as a register that is read before its load has returned. See docs/concepts/emulator.md.
"""

from pallas_kernels.emulator.code_object import KernelCode, read_code_object
from pallas_kernels.emulator.counts import Counts
from pallas_kernels.emulator.errors import EmulationError
from pallas_kernels.emulator.global_memory import Buffer
from pallas_kernels.emulator.machine import Emulator, Execution, execute
from pallas_kernels.emulator.state import KernelLaunch
