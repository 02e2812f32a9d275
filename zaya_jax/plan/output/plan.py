"""A plan as data: the arithmetic of a run on a cluster, and its compiled step."""

import dataclasses
import math
from typing import Any

from zaya_jax.config import Config
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters
from zaya_jax.parallel.mesh import check_batch_size
from zaya_jax.plan.arithmetic import (
    LINKS,
    Communication,
    DataRate,
    Gemm,
    Operations,
    communication,
    data_rate,
    gemms,
    operations,
    recomputed_flops,
    seconds_in_turn,
    step_seconds,
)
from zaya_jax.plan.bounds import step_bounds
from zaya_jax.plan.cases import CASES, PUBLISHED, TimeRange, step_range
from zaya_jax.plan.compiled.hlo import Collective, Program, largest_buffers
from zaya_jax.plan.compiled.step_time import StepTime, model_step
from zaya_jax.plan.compiled.traffic import moved_bytes
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.integrity_costs import IntegrityCost, integrity_costs
from zaya_jax.plan.memory import POLICIES, PeerCopyCost, activation_bytes, memory_by_kind, peer_copy_cost
from zaya_jax.plan.rocm.compiler import Compilation, Job, Memory
from zaya_jax.plan.shares import for_platform, micro_batch, own_tokens

PROGRAM = "zaya_jax.plan.compiled.train_program:lower_train_step"
NUM_BUFFERS = 10
SCOPES = ("attention", "experts", "loss", "optimizer", "checksums")
"""Named scopes of the train step whose products and traffic are reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Cost of a remat policy.

    Attributes:
      activations: bytes that a GPU keeps for the backward pass.
      recomputed: recomputed FLOPs per token.
    """

    activations: int
    recomputed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Arithmetic of a run.

    Attributes:
      run: name of the run folder.
      device: name of the GPU.
      device_memory: bytes of one GPU.
      nodes: number of nodes.
      gpus_per_node: GPUs per node.
      parameters: parameters of the network.
      active_parameters: parameters active per token, without the embedding.
      sequence_length: tokens per sequence.
      context_gpus: GPUs per sequence.
      batch_size: sequences per step.
      num_steps: steps of the phase.
      watts: maximum power of a GPU.
      micro_batch: sequences that a GPU processes at a time, alone or with others.
      operations: operations of a step.
      memory: bytes on each GPU, by kind.
      remat: the run's remat policy.
      policies: cost of all policies, by name.
      communication: communication of a step.
      bounds: lower bound of the seconds per step, by resource.
      seconds: estimated seconds per step, by resource: products at their peak, links with padded messages in
        the published case.
      in_turn: seconds per step in all cases if the resources work one after the other.
      measured: resources with measured figures; the others use data sheets.
      gemms: products as a GPU runs them.
      saturating_flops: FLOPs that a product needs to reach the device's peak; None if not measured.
      data: data that a step reads.
      integrity: costs of the checks for silent corruption, whether the run enables them or not.
      peer_copies: cost of copies of the state in the memory of nodes, whether the run makes them or not.
    """

    run: str
    device: str
    device_memory: int
    nodes: int
    gpus_per_node: int
    parameters: int
    active_parameters: int
    sequence_length: int
    context_gpus: int
    batch_size: int
    num_steps: int
    watts: float
    micro_batch: int
    operations: Operations
    memory: dict[str, int]
    remat: str
    policies: dict[str, Policy]
    communication: Communication
    bounds: dict[str, float]
    seconds: dict[str, float]
    in_turn: TimeRange
    measured: tuple[str, ...]
    gemms: list[Gemm]
    saturating_flops: float | None
    data: DataRate
    integrity: tuple[IntegrityCost, ...]
    peer_copies: PeerCopyCost

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def own_tokens(self) -> int:
        """Number of tokens of a sequence on one GPU."""
        return self.sequence_length // self.context_gpus

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.batch_size * self.sequence_length

    @property
    def seconds_in_turn(self) -> float:
        """Estimated step time in the published case if the resources work one after the other."""
        # No overlap is assumed, not even between the links in a node and the NICs.
        return sum(self.estimates.values())

    @property
    def estimates(self) -> dict[str, float]:
        """Estimated seconds of each resource; products do not reach their peak."""
        return seconds_in_turn(self.seconds, PUBLISHED.product_share)

    @property
    def bound(self) -> str:
        """The resource with the longest lower bound: no step is shorter."""
        return max(self.bounds, key=self.bounds.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """All collectives of one kind in a compiled step.

    Attributes:
      count: number of runs per step.
      num_bytes: total bytes on one GPU.
      largest_bytes: bytes of the largest array.
      dtypes: HLO's names of the arrays' types.
      overlapped_flops: FLOPs of products scheduled between their starts and dones.
      overlapped_kernels: number of kernels scheduled there.
    """

    count: int
    num_bytes: int
    largest_bytes: int
    dtypes: tuple[str, ...]
    overlapped_flops: float
    overlapped_kernels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled step.

    Attributes:
      memory: memory of a GPU.
      collectives: collectives by kind.
      flops: FLOPs of all products of a GPU per step.
      flops_by_scope: FLOPs by named scope.
      moved_bytes: bytes that kernels read and write in memory.
      moved_bytes_by_scope: the same by named scope.
      times: modelled times, by name of the case.
      step_range: modelled time of the step in all cases.
      buffers: the largest buffers: bytes, and the values that share them.
      num_kernels: number of kernels made by XLA.
      problems: problems of kernels, by name.
      compile_seconds: compile time of XLA.
      wall_seconds: time of the whole process.
    """

    memory: Memory
    collectives: dict[str, CollectiveKind]
    flops: float
    flops_by_scope: dict[str, float]
    moved_bytes: float
    moved_bytes_by_scope: dict[str, float]
    times: dict[str, StepTime]
    step_range: TimeRange
    buffers: list[tuple[int, str]]
    num_kernels: int
    problems: dict[str, list[str]]
    compile_seconds: float
    wall_seconds: float


def make_plan(config: Config, cluster: Cluster, *, measured: tuple[str, ...] = ()) -> Plan:
    """Computes the arithmetic of a run.

    Args:
      config: config of the run.
      cluster: cluster of the run.
      measured: resources for which the cluster has measured figures.

    Raises:
      UserError: if the batch cannot be divided among the GPUs.
    """
    config = for_platform(config, cluster.device.platform)
    num_gpus, time, execution = cluster.num_gpus, config.data.sequence_length, config.execution
    check_batch_size(config.data.batch_size, execution.num_microbatches, num_gpus, execution.context_devices)
    # Activations are counted for the sequences that a GPU processes at a time.
    rows = micro_batch(config, num_gpus)
    seconds = step_seconds(config, cluster)
    policies = {name: dataclasses.replace(config.execution, remat=name) for name in POLICIES}
    in_turn = sum(seconds_in_turn(seconds, PUBLISHED.product_share).values())
    return Plan(
        run=config.run_folder,
        device=cluster.device.name,
        device_memory=cluster.device.memory_bytes,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        parameters=count_parameters(config.model),
        active_parameters=active_parameters(config.model),
        sequence_length=time,
        context_gpus=execution.context_devices,
        batch_size=config.data.batch_size,
        num_steps=config.train.num_steps,
        watts=cluster.device.watts,
        micro_batch=rows,
        operations=operations(config, num_gpus),
        memory=memory_by_kind(config, num_gpus),
        remat=config.execution.remat,
        policies={
            name: Policy(
                activations=rows * activation_bytes(config.model, policy, own_tokens(config)),
                recomputed=recomputed_flops(config.model, policy, time),
            )
            for name, policy in policies.items()
        },
        communication=communication(config, cluster),
        bounds=step_bounds(config, cluster),
        seconds=seconds,
        in_turn=step_range(lambda case: _in_turn(config, cluster.in_case(case), seconds)),
        measured=measured,
        gemms=gemms(config, num_gpus),
        saturating_flops=cluster.device.saturating_flops,
        data=data_rate(config),
        integrity=integrity_costs(config, cluster, in_turn),
        peer_copies=peer_copy_cost(config, cluster),
    )


def _in_turn(config: Config, cluster: Cluster, seconds: dict[str, float]) -> float:
    """Step time in the cluster's case if the resources work one after the other."""
    links = communication(config, cluster)
    changed = dict(zip(LINKS, (links.link_seconds, links.network_seconds), strict=True))
    return sum(seconds_in_turn(seconds | changed, cluster.case.product_share).values())


def train_step_job(config: Config, cluster: Cluster) -> Job:
    """The compilation job of a run's train step."""
    return Job(program=PROGRAM, arguments={"config": config}, cluster=cluster)


def read_compilation(compilation: Compilation, cluster: Cluster) -> CompiledStep:
    """Extracts the figures of a compiled train step."""
    program = Program(compilation.hlo)
    return CompiledStep(
        memory=compilation.memory,
        collectives={
            kind: _sum([each for each in program.collectives if each.kind == kind])
            for kind in sorted({each.kind for each in program.collectives})
        },
        flops=program.flops(),
        flops_by_scope={scope: program.flops(scope) for scope in SCOPES},
        moved_bytes=moved_bytes(program),
        moved_bytes_by_scope={scope: moved_bytes(program, scope) for scope in SCOPES},
        times={case.name: model_step(program, cluster.in_case(case)) for case in CASES},
        step_range=step_range(lambda case: model_step(program, cluster.in_case(case)).seconds),
        buffers=largest_buffers(compilation.buffers, NUM_BUFFERS),
        num_kernels=len(compilation.kernels),
        problems={
            kernel.name: problems
            for kernel in compilation.kernels
            if (problems := kernel.problems(cluster.device))
        },
        compile_seconds=compilation.compile_seconds,
        wall_seconds=compilation.wall_seconds,
    )


def to_json(plan: Plan, step: CompiledStep | None = None, **more: Any) -> dict[str, Any]:
    """Returns a plan, its compiled step and further values as plain values, for `json.dumps`."""
    values = {"plan": dataclasses.asdict(plan)} | more
    return values if step is None else values | {"compiled": dataclasses.asdict(step)}


def _sum(collectives: list[Collective]) -> CollectiveKind:
    return CollectiveKind(
        count=sum(c.runs for c in collectives),
        num_bytes=sum(c.runs * c.num_bytes for c in collectives),
        largest_bytes=max(c.largest_bytes for c in collectives),
        dtypes=tuple(sorted({dtype for c in collectives for dtype in c.dtypes})),
        overlapped_flops=math.fsum(c.runs * c.overlapped_flops for c in collectives),
        overlapped_kernels=sum(c.runs * c.overlapped_kernels for c in collectives),
    )
