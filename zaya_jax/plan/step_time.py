"""How long a compiled step would take: a model, of which nothing has run on hardware.

Kernels run one after the other, in the order in which they were scheduled. Each takes as long as its own
bound: its operations at a share of the peak, or its bytes at the bandwidth of memory, whichever is more.
Collectives run beside them, one at a time; a step waits for one where it stands done in the schedule.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping

from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.hlo import COLLECTIVES, Instruction, Program, in_scope
from zaya_jax.plan.kernel_work import kernel_flops
from zaya_jax.plan.traffic import instruction_bytes

SHARES = (0.4, 0.6, 1.0)
"""Of the peak that products reach. AMD's recipes in JAX have 29% in all, of dense 70B models on MI300X."""
HOP_SECONDS = 5e-6
"""From one GPU of a ring to the next; assumed. A message goes around all of them."""
LINKS_REACHED = 0.75
NETWORK_REACHED = 0.8
"""Of what links and NICs have on paper; assumed, where `zaya bench collectives` has not measured."""
SMALL_BYTES = 1e6
SMALL_SECONDS = 2e-4
"""A message below so many bytes goes along a tree, and takes no more."""
_KINDS = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
"""As measurements name them."""
WORKS = (
    (
        "attention's scores and values",
        ("flash_attention", "flash_attention_grad_keys", "flash_attention_grad_queries"),
    ),
    ("weights and gradients, laid out to travel", ("gather_weights", "sum_gradients")),
    ("optimiser", ("optimizer",)),
    ("loss", ("loss",)),
    ("experts", ("experts",)),
    ("attention", ("attention",)),
)
"""What a kernel works at, by the named scopes of the step; the first that it is in counts."""
REST = "layers' slices, residuals, embedding and others"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTime:
    """What kernels of a kind do in a step, on one GPU.

    Attributes:
      seconds: by their own bounds.
      flops: of their products.
      num_bytes: that they move.
    """

    seconds: float
    flops: float
    num_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """A modelled step.

    Attributes:
      share: of the peak that products reach.
      seconds: of the step.
      kernel_seconds: of its kernels alone.
      collective_seconds: of its collectives alone.
      exposed_seconds: that kernels wait for collectives.
      between_nodes_seconds: of these, while one between nodes is under way.
      works: what the kernels do, by kind.
    """

    share: float
    seconds: float
    kernel_seconds: float
    collective_seconds: float
    exposed_seconds: float
    between_nodes_seconds: float
    works: Mapping[str, WorkTime]

    @property
    def hidden_seconds(self) -> float:
        """Of collectives that are under way beside kernels."""
        return max(self.collective_seconds - self.exposed_seconds, 0.0)


def model_step(program: Program, cluster: Cluster, share: float) -> StepTime:
    """The modelled time of a compiled step.

    Args:
      program: as it was scheduled.
      cluster: on which.
      share: of the peak that products reach, above 0 and at most 1.
    """
    replay = _Replay(program, cluster, share)
    replay.run(program.entry, 1.0)
    return StepTime(
        share=share,
        seconds=replay.now,
        kernel_seconds=sum(work.seconds for work in replay.works.values()),
        collective_seconds=replay.collective_seconds,
        exposed_seconds=replay.exposed_seconds,
        between_nodes_seconds=replay.between_nodes_seconds,
        works=dict(replay.works),
    )


def collective_seconds(kind: str, num_bytes: int, group: tuple[int, ...], cluster: Cluster) -> float:
    """That a collective takes.

    Args:
      kind: as HLO has it.
      num_bytes: of its larger end, on one GPU.
      group: GPUs that take part, numbered node by node; empty for all.
      cluster: whose GPUs these are.
    """
    name = _KINDS[kind]
    ranks = len(group) or cluster.num_gpus
    nodes = _num_nodes(group, cluster)
    in_node = dataclasses.replace(cluster, nodes=1, gpus_per_node=max(ranks // nodes, 1), measured=None)
    between = dataclasses.replace(cluster, nodes=nodes, gpus_per_node=in_node.gpus_per_node, measured=None)
    link = cluster.curve_in_node(name)
    network = cluster.curve_between_nodes(name)
    links = (
        link.among(num_bytes, in_node.gpus_per_node)
        if link and in_node.gpus_per_node > 1
        else in_node.node_seconds(name, num_bytes) / LINKS_REACHED
    )
    part = num_bytes / in_node.gpus_per_node
    nics = (
        network.among(part, nodes)
        if network and nodes > 1
        else between.network_seconds(name, num_bytes) / NETWORK_REACHED
    )
    # A file of measurements has the hops in it.
    hops = 0.0 if (network if nodes > 1 else link) else (ranks - 1) * HOP_SECONDS
    if num_bytes < SMALL_BYTES:
        return min(max(links, nics) + hops, SMALL_SECONDS)
    return max(links, nics) + hops


def _num_nodes(group: tuple[int, ...], cluster: Cluster) -> int:
    """Whose GPUs a collective's group has."""
    return len({gpu // cluster.gpus_per_node for gpu in group}) if group else cluster.nodes


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """When a collective has the links, and whether these are between nodes."""

    begins: float
    ends: float
    is_between: bool

    def later(self, seconds: float) -> "_UnderWay":
        return _UnderWay(self.begins + seconds, self.ends + seconds, self.is_between)


class _Replay:
    """A program run by the model, with a clock."""

    def __init__(self, program: Program, cluster: Cluster, share: float):
        self._program, self._cluster = program, cluster
        self._flops, self._bandwidth = share * cluster.device.matrix_flops, cluster.device.memory_bandwidth
        self.now = 0.0
        self.collective_seconds = self.exposed_seconds = self.between_nodes_seconds = 0.0
        self._sent: list[_UnderWay] = []
        self.works: dict[str, WorkTime] = collections.defaultdict(
            lambda: WorkTime(seconds=0.0, flops=0.0, num_bytes=0.0)
        )

    def run(self, computation: str, weight: float) -> None:
        """Runs a computation; its figures count `weight` times, and its time once."""
        under_way: dict[str, float] = {}
        for instruction in self._program.computations[computation]:
            if instruction.opcode == "while":
                self._loop(self._largest(instruction), instruction.trips, weight)
            elif instruction.opcode in ("conditional", "call"):
                self.run(self._largest(instruction), weight)
            elif instruction.opcode.removesuffix("-start") in COLLECTIVES:
                end = self._send(instruction, computation, weight)
                under_way[instruction.name] = end
                if not instruction.opcode.endswith("-start"):
                    self._wait(end, weight)
            elif instruction.opcode.endswith("-done") and instruction.operands[:1]:
                self._wait(under_way.get(instruction.operands[0], self.now), weight)
            else:
                self._compute(instruction, computation, weight)

    def _loop(self, body: str, trips: int, weight: float) -> None:
        """The first round may find links busy; all others are as the second one."""
        self.run(body, weight)
        if trips > 1:
            began = self.now
            self.run(body, weight * (trips - 1))
            more = (self.now - began) * (trips - 2)
            self.now += more
            self._sent = [each.later(more) for each in self._sent]

    def _largest(self, instruction: Instruction) -> str:
        """Of several branches the one with most in it; of a loop its body."""
        known = [name for name in instruction.called if name in self._program.computations]
        return max(known, key=lambda name: len(self._program.computations[name]))

    def _send(self, instruction: Instruction, computation: str, weight: float) -> float:
        shapes = self._program.shapes(computation)
        kind = instruction.opcode.removesuffix("-start")
        given = _size(shape for name in instruction.operands for shape in shapes.get(name, ()))
        made = _size(instruction.shapes) - (given if instruction.opcode.endswith("-start") else 0)
        group = _first_group(instruction.attributes)
        seconds = collective_seconds(kind, max(given, made), group, self._cluster)
        self.collective_seconds += weight * seconds
        self._sent = [each for each in self._sent if each.ends > self.now]
        begins = max([self.now, *(each.ends for each in self._sent)])
        is_between = _num_nodes(group, self._cluster) > 1
        self._sent.append(_UnderWay(begins, begins + seconds, is_between))
        return begins + seconds

    def _wait(self, end: float, weight: float) -> None:
        end = max(end, self.now)
        self.exposed_seconds += weight * (end - self.now)
        # Not for the one that is waited for: another may be before it.
        for each in self._sent:
            if each.is_between:
                together = min(each.ends, end) - max(each.begins, self.now)
                self.between_nodes_seconds += weight * max(together, 0.0)
        self.now = end

    def _compute(self, instruction: Instruction, computation: str, weight: float) -> None:
        num_bytes = instruction_bytes(self._program, instruction, computation)
        flops = kernel_flops(self._program, instruction, computation)
        seconds = max(flops / self._flops, num_bytes / self._bandwidth)
        if not seconds:
            return
        self.now += seconds
        kind = next((name for name, scopes in WORKS if _is_in(instruction, scopes)), REST)
        before = self.works[kind]
        self.works[kind] = WorkTime(
            seconds=before.seconds + weight * seconds,
            flops=before.flops + weight * flops,
            num_bytes=before.num_bytes + weight * num_bytes,
        )


def _is_in(instruction: Instruction, scopes: tuple[str, ...]) -> bool:
    return any(in_scope(instruction.op_name, scope) for scope in scopes)


def _size(shapes) -> int:
    return sum(shape.num_bytes for shape in shapes)


_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](T\(1,0\))?")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


def _first_group(attributes: str) -> tuple[int, ...]:
    """GPUs of a collective's first group; empty for all, and for a form that is not known."""
    if found := _LISTED.search(attributes):
        return tuple(int(gpu) for gpu in found[1].split(","))
    if found := _PAIRS.search(attributes):
        return int(found[1]), int(found[2])
    if found := _COUNTED.search(attributes):
        groups, size = int(found[1]), int(found[2])
        # Numbered row by row, or, transposed, column by column.
        return tuple(range(0, groups * size, groups)) if found[4] else tuple(range(size))
    return ()
