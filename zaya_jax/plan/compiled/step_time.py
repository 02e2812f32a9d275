"""A model of the time of a compiled step. docs/validation.md compares it with one H200, not with MI300X.

Kernels run one after the other in the scheduled order. Each takes the longer of its operations, at a share of
the peak for the type of their operands, and its bytes at the memory bandwidth. Collectives run concurrently
with kernels, and take the time of `zaya_jax.plan.links`; the step waits for a collective at its done
instruction. Two collectives run at the same time only if the program assigns them to different streams, and
one uses the links of a node and the other the NICs; in cases without `PlanCase.links_at_once` always one
after the other.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from zaya_jax.plan.compiled.hlo import COLLECTIVES, Instruction, Program, in_scope, total_bytes
from zaya_jax.plan.compiled.kernel_work import is_pallas, kernel_flops
from zaya_jax.plan.compiled.traffic import instruction_bytes
from zaya_jax.plan.devices import Cluster

_KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
"""Names of the collectives in measurements."""
KERNEL_SCOPES = (
    (
        "attention's scores and values",
        ("flash_attention", "flash_attention_grad_keys", "flash_attention_grad_queries"),
    ),
    ("weights and gradients, laid out to travel", ("gather_weights", "sum_gradients")),
    ("optimiser", ("optimizer",)),
    ("loss", ("loss",)),
    ("experts", ("experts",)),
    ("attention", ("attention",)),
    ("checksums of state and gradients", ("checksums",)),
)
"""Kinds of kernels by named scopes of the step; the first match counts."""
COLLECTIVE_SCOPES = (
    ("weights", ("gather_weights", "sum_gradients")),
    ("optimizer", ("optimizer",)),
    ("a layer's experts", ("experts",)),
    ("keys and values", ("attention",)),
)
"""What a collective carries, by named scopes of the step; the first match counts. All-to-alls and
reduce-scatters carry gradients of it."""
REST = "layers' slices, residuals, embedding and others"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTime:
    """Work of one kind of kernels in a step, on one GPU.

    Attributes:
      seconds: sum of the kernels' lower bounds.
      flops: FLOPs of their products.
      num_bytes: bytes that they move.
    """

    seconds: float
    flops: float
    num_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Modelled time of a step.

    Attributes:
      case: name of the case of `zaya_jax.plan.cases.CASES`.
      share: share of the peak FLOP/s that products reach.
      seconds: time of the step.
      kernel_seconds: time of the kernels alone.
      collective_seconds: time of the collectives alone.
      exposed_seconds: time that kernels wait for collectives.
      between_nodes_seconds: part of `exposed_seconds` with a collective between nodes in flight.
      exposed: `exposed_seconds` by the collective in flight: its kind, scope and links.
      works: work of the kernels by kind.
    """

    case: str
    share: float
    seconds: float
    kernel_seconds: float
    collective_seconds: float
    exposed_seconds: float
    between_nodes_seconds: float
    exposed: Mapping[str, float]
    works: Mapping[str, WorkTime]

    @property
    def hidden_seconds(self) -> float:
        """Time of collectives that overlaps with kernels."""
        return max(self.collective_seconds - self.exposed_seconds, 0.0)


def model_step(program: Program, cluster: Cluster) -> StepTime:
    """Models the time of a compiled step.

    Args:
      program: scheduled program.
      cluster: cluster of the run, with the case to model.
    """
    replay = _Replay(program, cluster)
    replay.run(program.entry, 1.0)
    return StepTime(
        case=cluster.case.name,
        share=cluster.case.product_share,
        seconds=replay.now,
        kernel_seconds=sum(work.seconds for work in replay.works.values()),
        collective_seconds=replay.collective_seconds,
        exposed_seconds=math.fsum(replay.exposed.values()),
        between_nodes_seconds=replay.between_nodes_seconds,
        exposed=dict(replay.exposed),
        works=dict(replay.works),
    )


def collective_seconds(kind: str, num_bytes: int, group: tuple[int, ...], cluster: Cluster) -> float:
    """Returns the time of a collective.

    Args:
      kind: HLO's name of the collective.
      num_bytes: bytes of its larger end on one GPU.
      group: participating GPUs, numbered node by node; empty means all.
      cluster: cluster of these GPUs.
    """
    nodes = _num_nodes(group, cluster)
    ranks = max((len(group) or cluster.num_gpus) // nodes, 1)
    return cluster.links.seconds(_KINDS[kind], num_bytes, ranks=ranks, nodes=nodes)


def _num_nodes(group: tuple[int, ...], cluster: Cluster) -> int:
    """Number of nodes that a collective's group spans."""
    return len({gpu // cluster.gpus_per_node for gpu in group}) if group else cluster.nodes


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """Time during which a collective is executed, its name, and what it occupies: its stream and links."""

    begins: float
    ends: float
    name: str
    occupied: frozenset[str]

    def later(self, seconds: float) -> "_InFlight":
        return dataclasses.replace(self, begins=self.begins + seconds, ends=self.ends + seconds)


class _Replay:
    """Execution of a program by the model, with a clock."""

    def __init__(self, program: Program, cluster: Cluster):
        self._program, self._cluster = program, cluster
        self.now = 0.0
        self.collective_seconds = self.between_nodes_seconds = 0.0
        self.exposed: dict[str, float] = collections.defaultdict(float)
        self._sent: list[_InFlight] = []
        self.works: dict[str, WorkTime] = collections.defaultdict(
            lambda: WorkTime(seconds=0.0, flops=0.0, num_bytes=0.0)
        )

    def run(self, computation: str, weight: float) -> None:
        """Runs a computation once; its work counts `weight` times."""
        in_flight: dict[str, _InFlight] = {}
        for instruction in self._program.computations[computation]:
            if instruction.opcode == "while":
                self._loop(self._largest(instruction), instruction.trips, weight)
            elif instruction.opcode in ("conditional", "call"):
                self.run(self._largest(instruction), weight)
            elif instruction.opcode.removesuffix("-start") in COLLECTIVES:
                sent = in_flight[instruction.name] = self._send(instruction, computation, weight)
                if not instruction.opcode.endswith("-start"):
                    self._wait(sent, weight)
            elif instruction.opcode.endswith("-done") and instruction.operands[:1]:
                # The done of another asynchronous operation, such as a copy, has no entry and waits for
                # nothing.
                if sent := in_flight.get(instruction.operands[0]):
                    self._wait(sent, weight)
            else:
                self._compute(instruction, computation, weight)

    def _loop(self, body: str, trips: int, weight: float) -> None:
        """Runs a loop body. The first iteration may find busy links; all others are like the second."""
        self.run(body, weight)
        if trips > 1:
            began = self.now
            # This run stands for all further iterations, so that its work counts as often.
            self.run(body, weight * (trips - 1))
            # Skip the remaining iterations by advancing the clock and the collectives in flight.
            more = (self.now - began) * (trips - 2)
            self.now += more
            self._sent = [each.later(more) for each in self._sent]

    def _largest(self, instruction: Instruction) -> str:
        """The body of a loop, or the largest of several branches."""
        known = [name for name in instruction.called if name in self._program.computations]
        # The model does not know which branch a step takes, and assumes the longest.
        return max(known, key=lambda name: len(self._program.computations[name]))

    def _send(self, instruction: Instruction, computation: str, weight: float) -> _InFlight:
        shapes = self._program.shapes(computation)
        kind = instruction.opcode.removesuffix("-start")
        inputs = total_bytes(shape for name in instruction.operands for shape in shapes.get(name, ()))
        # A start instruction lists its operands among its results.
        outputs = total_bytes(instruction.shapes) - (inputs if instruction.opcode.endswith("-start") else 0)
        group = _first_group(instruction.attributes)
        # The result of an all-gather is the whole array, and so is the operand of a reduce-scatter.
        seconds = collective_seconds(kind, max(inputs, outputs), group, self._cluster)
        self.collective_seconds += weight * seconds
        # Collectives that have ended no longer occupy the links.
        self._sent = [each for each in self._sent if each.ends > self.now]
        occupied = self._occupied(instruction, group)
        # A collective starts when its stream and its links are free.
        begins = max([self.now, *(each.ends for each in self._sent if each.occupied & occupied)])
        where = _BETWEEN if _BETWEEN in occupied else _IN_NODE
        name = f"{_content(instruction, kind)}, {kind} {where}"
        self._sent.append(_InFlight(begins, begins + seconds, name, occupied))
        return self._sent[-1]

    def _occupied(self, instruction: Instruction, group: tuple[int, ...]) -> frozenset[str]:
        """The stream of a collective, and its links."""
        nodes = _num_nodes(group, self._cluster)
        is_in_node = nodes == 1 or (len(group) or self._cluster.num_gpus) > nodes
        occupied = {_IN_NODE} if is_in_node else set()
        occupied |= {_BETWEEN} if nodes > 1 else set()
        matched = _STREAM.search(instruction.attributes)
        # XLA runs collectives without an assigned stream on the first one.
        stream = int(matched[1]) if matched and self._cluster.case.links_at_once else 0
        return frozenset({*occupied, f"stream {stream}"})

    def _wait(self, sent: _InFlight, weight: float) -> None:
        # Attribute the wait to what occupies the stream and the links: an earlier collective may delay this.
        end = sent.ends
        for each in sorted(self._sent, key=lambda each: -each.ends):
            begins = max(each.begins, self.now)
            if each.occupied & sent.occupied and begins < (until := min(each.ends, end)):
                waited, end = weight * (until - begins), begins
                self.exposed[each.name] += waited
                self.between_nodes_seconds += waited * (_BETWEEN in each.occupied)
        self.now = max(sent.ends, self.now)

    def _compute(self, instruction: Instruction, computation: str, weight: float) -> None:
        num_bytes = instruction_bytes(self._program, instruction, computation)
        flops = kernel_flops(self._program, instruction, computation)
        cluster = self._cluster
        compute = flops.short / cluster.product_flops + flops.float32 / cluster.float32_product_flops
        compute /= cluster.case.kernel_rate if is_pallas(instruction) else 1.0
        # Roofline: the longer of compute and memory time.
        seconds = max(compute, num_bytes / cluster.device.memory_bandwidth)
        if not seconds:
            return
        self.now += seconds
        # An instruction in several scopes counts once, for the first of them.
        kind = next((name for name, scopes in KERNEL_SCOPES if _is_in(instruction, scopes)), REST)
        before = self.works[kind]
        self.works[kind] = WorkTime(
            seconds=before.seconds + weight * seconds,
            flops=before.flops + weight * flops.total,
            num_bytes=before.num_bytes + weight * num_bytes,
        )


def _content(instruction: Instruction, kind: str) -> str:
    """What a collective carries."""
    content = next((name for name, scopes in COLLECTIVE_SCOPES if _is_in(instruction, scopes)), "statistics")
    # The transposed gather of weights is the exchange of their gradients, under the same scope.
    return f"gradients of {content}" if kind in ("all-to-all", "reduce-scatter") else content


def _is_in(instruction: Instruction, scopes: tuple[str, ...]) -> bool:
    return any(in_scope(instruction.op_name, scope) for scope in scopes)


_IN_NODE, _BETWEEN = "in the node", "between nodes"
_STREAM = re.compile(r'_xla_stream_annotation="(\d+)"')
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](T\(1,0\))?")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


def _first_group(attributes: str) -> tuple[int, ...]:
    """GPUs of a collective's first group; empty for all GPUs, and for an unknown notation."""
    # The groups of a collective have equal sizes, so that the first one stands for all.
    if match := _LISTED.search(attributes):
        return tuple(int(gpu) for gpu in match[1].split(","))
    # A permutation has pairs instead of groups; the first pair tells whether it leaves the node.
    if match := _PAIRS.search(attributes):
        return int(match[1]), int(match[2])
    if match := _COUNTED.search(attributes):
        groups, size = int(match[1]), int(match[2])
        # The iota notation numbers GPUs row by row, or column by column when it is transposed.
        return tuple(range(0, groups * size, groups)) if match[4] else tuple(range(size))
    return ()
