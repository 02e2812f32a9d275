"""Static check of the wait states that gfx942 leaves to software, on all paths of a kernel's machine code.

The hardware does not interlock some pairs of instructions: unless enough others stand between, the second
one reads stale registers. LLVM inserts `s_nop` for its own instructions, but not for inline assembly. A
kernel whose `v_exp_f32` of inline assembly reads the result of a matrix instruction compiles without a
warning and is wrong now and then on hardware; it is found here, because machine code no longer shows where
an instruction came from.

The rules are those of LLVM's GCNHazardRecognizer for gfx940 (checkVALUHazards, checkVMEMHazards,
checkDPPHazards, checkDivFMasHazards, checkRWLaneHazards, checkMAIHazards90A, checkMAIVALUHazards) for the
instructions that the emulator knows. `s_waitcnt` is not a matter of wait states; the emulator checks it
while it executes.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pallas_kernels.emulator.code_object import KernelCode
from pallas_kernels.emulator.decode import decode
from pallas_kernels.emulator.instruction import EXEC, VCC, GpuInstruction, Operand

Register = tuple[str, int]
"""Kind and number of a register."""
TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
READS_LANES = ("v_readlane_b32", "v_readfirstlane_b32")
MATRIX_NAME = re.compile(r"v_mfma_[fi]32_(\d+)x\d+x\d+_?(\w+)")
MAX_STATES = 19
"""The longest wait of any rule, in wait states."""
WAIT_FOR_ADDEND = {2: 1, 4: 3, 8: 7, 16: 15}
"""Wait states before the addend of a matrix instruction may be overwritten, by its passes."""
EXEC_REGISTERS = frozenset({("scalar", EXEC), ("scalar", EXEC + 1)})
VCC_REGISTERS = frozenset({("scalar", VCC), ("scalar", VCC + 1)})
WIDE_STORE = "data of a wide store overwritten"
FIRST_PATH = "LLVM searches each block on the first path that it meets, which is longer"
BRANCHY_STORE = "LLVM forgets a wait state after a wide store in front of a join (as in its issue 202333)"
WHOLE = 6
"""SDWA selection of a whole register as the destination."""


@dataclasses.dataclass(frozen=True)
class HazardPath:
    """What lies between two instructions.

    Attributes:
      over_branch: whether a branch is taken.
      over_join: whether another path joins.
      over_matrix: whether another matrix instruction is executed.
    """

    over_branch: bool = False
    over_join: bool = False
    over_matrix: bool = False


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Two instructions that stand too close to each other.

    Attributes:
      pc: address of the second instruction.
      text: the second instruction.
      earlier_pc: address of the first instruction.
      earlier_text: the first instruction.
      rule: what the first one does to the second one.
      needed: wait states that must lie between.
      found: wait states on the shortest path between.
      path: what lies on that path.
    """

    pc: int
    text: str
    earlier_pc: int
    earlier_text: str
    rule: str
    needed: int
    found: int
    path: HazardPath

    @property
    def known_defect(self) -> str | None:
        """The defect of the compiler that explains it; None for any other hazard.

        A matrix result that is read one or two states early over a taken branch: getWaitStatesSince of
        GCNHazardRecognizer marks blocks as visited, so that only the first path to each counts. It is
        harmless if another matrix instruction follows the first one: the unit accepts it only after all
        passes of the first, which LLVM counts as one state. Inline assembly has no such excuse, so that
        transcendental instructions are never explained this way.

        Data of a wide store that are overwritten one state early after a join: LLVM's issue 202333 and pull
        requests 203770 and 218550 describe this very sequence on gfx950, where the store writes what the
        next instruction computes. That is not harmless; it is named so that other hazards are not lost
        among these. All such stores in our kernels precede a join, but XLA's plugin does not tell which
        LLVM it contains.
        """
        short = self.needed - self.found
        if self.rule == WIDE_STORE and short == 1 and self.path.over_join:
            return BRANCHY_STORE
        is_read_early = self.rule.startswith("matrix result") and "vector unit" in self.rule
        if is_read_early and short <= 2 and self.path.over_branch and self.path.over_matrix:
            return FIRST_PATH
        return None

    def __str__(self) -> str:
        return (
            f"{self.earlier_pc:#x} {self.earlier_text} -> {self.pc:#x} {self.text}: {self.rule}: "
            f"{self.found} of {self.needed} wait states"
            + (" over a taken branch" if self.path.over_branch else "")
        )


@dataclasses.dataclass(frozen=True)
class _Node:
    """An instruction with what the rules need to know.

    Attributes:
      instruction: the instruction.
      unit: "matrix", "transcendental", "vector", "memory", "local" or "scalar".
      reads: registers that it reads.
      writes: registers that it writes.
      touched: registers whose earlier use may be a hazard.
      addend: registers of a matrix instruction's addend.
      passes: passes of four cycles that a matrix instruction takes.
      is_wide_matrix: whether the wide matrix unit (XDL) executes it: all types but float32.
    """

    instruction: GpuInstruction
    unit: str
    reads: frozenset[Register]
    writes: frozenset[Register]
    touched: frozenset[Register]
    addend: frozenset[Register]
    passes: int
    is_wide_matrix: bool

    @property
    def name(self) -> str:
        """Mnemonic."""
        return self.instruction.name

    @property
    def is_vector(self) -> bool:
        """Whether the vector unit executes it."""
        return self.unit in ("vector", "transcendental")

    @property
    def states(self) -> int:
        """Wait states that it takes."""
        return (self.instruction.fields["simm16"] & 15) + 1 if self.name == "s_nop" else 1


def find_hazards(kernel: KernelCode) -> list[Hazard]:
    """Finds pairs of instructions with too few wait states between them, on any path.

    Args:
      kernel: machine code.

    Returns:
      Hazards in the order of the later instruction.
    """
    nodes = [_node(instruction) for instruction in decode(kernel)]
    predecessors = _predecessors(nodes)
    hazards = []
    for at, node in enumerate(nodes):
        # The hardware interlocks scalar instructions with all others, except for cases that no kernel has.
        if node.unit != "scalar":
            hazards += _hazards_of(at, nodes, predecessors)
    return hazards


def _node(instruction: GpuInstruction) -> _Node:
    unit = _unit(instruction.name)
    reads = _registers(instruction.sources)
    writes = _registers(instruction.destinations)
    if instruction.name.startswith("v_cmpx"):
        writes |= EXEC_REGISTERS
    # All vector instructions read EXEC, but only some read it so early that they must wait.
    reads_mask = unit == "matrix" or "dpp" in instruction.fields or instruction.name in READS_LANES
    if reads_mask or instruction.name == "v_writelane_b32":
        reads |= EXEC_REGISTERS
    passes, is_wide = _matrix_timing(instruction)
    addend = _registers(instruction.sources[2:]) if unit == "matrix" else frozenset()
    return _Node(instruction, unit, reads, writes, reads | writes, addend, passes, is_wide)


def _unit(name: str) -> str:
    if name.startswith(("v_mfma", "v_smfmac")):
        return "matrix"
    if name.startswith(TRANSCENDENTAL):
        return "transcendental"
    if name.startswith("v_"):
        return "vector"
    if name.startswith("ds_"):
        return "local"
    return "memory" if name.startswith(("global_", "buffer_", "flat_", "scratch_")) else "scalar"


def _registers(operands: Sequence[Operand]) -> frozenset[Register]:
    return frozenset(
        (operand.kind, operand.register + part)
        for operand in operands
        if operand.kind != "constant"
        for part in range(operand.count)
    )


def _matrix_timing(instruction: GpuInstruction) -> tuple[int, bool]:
    """Passes of a matrix instruction, and whether the wide unit executes it."""
    # A pass is four cycles, and a wait state is as long: LLVM counts both in the same unit.
    match = MATRIX_NAME.match(instruction.name)
    if not match:
        return 0, False
    size, is_wide = int(match[1]), match[2] != "f32"
    # float32 takes twice as long; blocks of 32 rows take twice as long as those of 16 (LLVM's SISchedule.td).
    return (2 if size == 4 else size // 4 if is_wide else size // 2), is_wide


def _predecessors(nodes: Sequence[_Node]) -> dict[int, list[tuple[int, bool]]]:
    """Positions of the instructions that may precede each one, and whether that is by a taken branch."""
    position = {node.instruction.pc: at for at, node in enumerate(nodes)}
    predecessors: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for at, node in enumerate(nodes):
        # A conditional branch also falls through.
        if node.name not in ("s_endpgm", "s_branch"):
            predecessors[at + 1].append((at, False))
        # A branch beyond the kernel's code would be the emulator's concern, not that of wait states.
        target = node.instruction.branch_target
        if target in position:
            predecessors[position[target]].append((at, True))
    return predecessors


def _hazards_of(
    at: int, nodes: Sequence[_Node], predecessors: dict[int, list[tuple[int, bool]]]
) -> Iterator[Hazard]:
    """Yields the hazards of one instruction with those before it, each on its worst path."""
    node = nodes[at]
    worst: dict[tuple[int, str], Hazard] = {}
    todo = [(p, 0, node.touched, path) for p, path in _steps(at, predecessors[at], HazardPath())]
    best: dict[tuple[int, frozenset[Register], HazardPath], int] = {}
    while todo:
        before, states, live, path = todo.pop()
        # A shorter path of this kind has already been followed from here on; loops end so, too.
        if best.get((before, live, path), MAX_STATES) <= states:
            continue
        best[before, live, path] = states
        earlier = nodes[before]
        for needed, rule in _needs(earlier, node, live):
            if states < needed:
                hazard = _hazard(earlier, node, rule, needed, states, path)
                worst[before, rule] = min(worst.get((before, rule), hazard), hazard, key=_by_severity)
        # A register that is written in between no longer has the earlier value; that write is checked itself.
        remaining = live - earlier.writes
        if remaining:
            through = dataclasses.replace(path, over_matrix=path.over_matrix or earlier.unit == "matrix")
            following = states + earlier.states
            todo += [(p, following, remaining, q) for p, q in _steps(before, predecessors[before], through)]
    yield from worst.values()


def _steps(
    at: int, predecessors: list[tuple[int, bool]], path: HazardPath
) -> Iterator[tuple[int, HazardPath]]:
    """Yields each instruction that may precede another one, with the path from it on."""
    joins = path.over_join or len(predecessors) > 1
    for before, by_branch in predecessors:
        yield before, HazardPath(path.over_branch or by_branch, joins, path.over_matrix)


def _by_severity(hazard: Hazard) -> tuple[bool, int]:
    # Paths without an excuse first: another path of the same length may have one.
    return hazard.known_defect is not None, hazard.found


def _hazard(earlier: _Node, node: _Node, rule: str, needed: int, found: int, path: HazardPath) -> Hazard:
    first, second = earlier.instruction, node.instruction
    return Hazard(second.pc, second.text, first.pc, first.text, rule, needed, found, path)


def _needs(earlier: _Node, node: _Node, live: frozenset[Register]) -> Iterator[tuple[int, str]]:
    """Yields wait states that must lie between two instructions, and why.

    Args:
      earlier: first instruction.
      node: second instruction.
      live: registers of the second one that nothing between them writes.
    """
    written = earlier.writes & live
    if earlier.unit == "matrix":
        yield from _after_matrix(earlier, node, live)
    elif earlier.is_vector and written:
        yield from _after_vector(earlier, node, written)
    elif earlier.unit == "memory":
        yield from _after_store(earlier, node, live)


def _after_matrix(earlier: _Node, node: _Node, live: frozenset[Register]) -> Iterator[tuple[int, str]]:
    written = earlier.writes & live
    latency = earlier.passes + (3 if earlier.is_wide_matrix else 2)
    # Matrix instructions read their factors first and their addend late, so that the two wait differently.
    if node.unit == "matrix":
        factors = node.instruction.sources[:2]
        if written & _registers(factors):
            yield latency, "matrix result read as a factor"
        if written & node.addend:
            yield _addend_latency(earlier, node), "matrix result read as an addend"
        return
    # Loads count as well: they write their register without regard to the matrix unit.
    if written & node.reads:
        yield latency, f"matrix result read by the {node.unit} unit"
    if written & node.writes:
        yield latency, f"matrix result overwritten by the {node.unit} unit"
    if earlier.is_wide_matrix and earlier.addend & live & node.writes:
        yield WAIT_FOR_ADDEND[earlier.passes], f"addend of a matrix overwritten by the {node.unit} unit"


def _addend_latency(earlier: _Node, node: _Node) -> int:
    # The same registers as result and then as addend are forwarded: sums over K are chained so.
    if node.addend == earlier.writes:
        return 2 if earlier.passes == 2 else 0
    if earlier.is_wide_matrix:
        return earlier.passes + 1
    return 0 if node.is_wide_matrix else earlier.passes


def _after_vector(earlier: _Node, node: _Node, written: frozenset[Register]) -> Iterator[tuple[int, str]]:
    reads = written & node.reads
    vectors = {register for register in reads if register[0] == "vector"}
    # Results of the vector unit are forwarded to the vector unit, but not to these consumers.
    if vectors and node.unit == "matrix":
        yield 2, f"{earlier.unit} result read by a matrix"
    # Transcendental instructions take longer; among themselves they wait for each other.
    if vectors and earlier.unit == "transcendental" and node.unit == "vector":
        yield 1, "transcendental result read by the vector unit"
    if vectors and node.name in READS_LANES:
        yield 1, "vector result read across lanes"
    if vectors and "dpp" in node.instruction.fields:
        yield 2, "vector result read by DPP"
    # The shifted result is not forwarded, and an overwrite reads the old value for error correction.
    if _writes_part(earlier) and node.is_vector and any(kind == "vector" for kind, _ in written):
        yield 1, "part of a register read or overwritten"
    yield from _after_scalar_result(node, reads - EXEC_REGISTERS - vectors)
    if reads & EXEC_REGISTERS:
        yield 5 if "dpp" in node.instruction.fields else 4, "EXEC of the vector unit read"


def _after_scalar_result(node: _Node, scalars: frozenset[Register]) -> Iterator[tuple[int, str]]:
    """Needs of an instruction that reads scalar registers which the vector unit writes."""
    if not scalars:
        return
    # Reading as an address, as a lane number or as a condition of v_div_fmas takes place earliest.
    if node.unit == "memory":
        yield 5, "scalar of the vector unit read by memory"
    elif node.name in ("v_readlane_b32", "v_writelane_b32"):
        yield 4, "scalar of the vector unit read as a lane"
    elif node.name.startswith("v_div_fmas") and scalars & VCC_REGISTERS:
        yield 4, "VCC read by v_div_fmas"
    elif node.is_vector:
        yield 2, "scalar of the vector unit read by the vector unit"


def _writes_part(node: _Node) -> bool:
    """Whether an instruction puts its result into a part of a register, which is not forwarded."""
    fields = node.instruction.fields
    upper_half = fields.get("opsel", 0) >> 3 & 1 and node.instruction.encoding == "VOP3"
    return bool(fields.get("dst_sel", WHOLE) != WHOLE or upper_half)


def _after_store(earlier: _Node, node: _Node, live: frozenset[Register]) -> Iterator[tuple[int, str]]:
    """Stores of more than eight bytes read their data late."""
    if "_store" not in earlier.name or not node.is_vector:
        return
    data = earlier.instruction.sources[1]
    # A buffer's offset in a scalar register delays the next instruction by one state (LLVM's pull request
    # 197267).
    has_scalar_offset = earlier.name.startswith("buffer") and earlier.instruction.sources[-1].kind == "scalar"
    if data.count > 2 and _registers([data]) & live & node.writes:
        yield 1 if has_scalar_offset else 2, WIDE_STORE
