"""A plan as data: what the arithmetic says of a run on a cluster, and what its compiled step says."""

import dataclasses
import math
from collections import Counter
from typing import Any

from zaya_jax.config import Config
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters
from zaya_jax.parallel.mesh import check_batch_size
from zaya_jax.plan.arithmetic import (
    LINKS,
    MATRIX_UNITS,
    Communication,
    DataRate,
    Gemm,
    Operations,
    communication,
    data_rate,
    gemms,
    operations,
    recomputed_flops,
    step_seconds,
)
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.hlo import Collective, Program, largest_buffers
from zaya_jax.plan.memory import POLICIES, activation_bytes, memory_by_kind
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.compiler import Compilation, Job, Memory
from zaya_jax.plan.shares import micro_batch, own_tokens
from zaya_jax.plan.step_time import SHARES, StepTime, model_step
from zaya_jax.plan.traffic import moved_bytes

PROGRAM = "zaya_jax.plan.train_program:lower_train_step"
NUM_BUFFERS = 10
SCOPES = ("attention", "experts", "loss", "optimizer")
"""Named scopes of the train step whose products are added up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A remat policy.

    Attributes:
      activations: bytes that a GPU keeps for the backward pass.
      recomputed: operations a token that are done a second time.
    """

    activations: int
    recomputed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What arithmetic says of a run.

    Attributes:
      run: its folder's name.
      device: of the cluster.
      device_memory: bytes of one.
      nodes: of the cluster.
      gpus_per_node: in each.
      parameters: of the network.
      active_parameters: that a token meets, without the embedding.
      sequence_length: tokens of a sequence.
      context_gpus: that share its tokens.
      batch_size: sequences a step.
      num_steps: of the phase.
      watts: of a GPU at most.
      micro_batch: sequences that a GPU has under way, alone or with others.
      operations: of a step.
      memory: bytes on each GPU, by kind.
      remat: the run's policy.
      policies: all of them, by name.
      communication: of a step.
      narrow_communication: the same if gradients were summed in bfloat16, which loses most of them.
      seconds: the least that each resource needs for a step, by resource.
      measured: resources whose figures were measured; those of others are on paper.
      gemms: products as a GPU runs them.
      saturating_flops: that a product needs to reach the device's peak; None where nobody has measured it.
      data: what a step reads.
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
    narrow_communication: Communication
    seconds: dict[str, float]
    measured: tuple[str, ...]
    gemms: list[Gemm]
    saturating_flops: float | None
    data: DataRate

    @property
    def num_gpus(self) -> int:
        """How many GPUs the cluster has."""
        return self.nodes * self.gpus_per_node

    @property
    def own_tokens(self) -> int:
        """How many tokens a GPU has of a sequence."""
        return self.sequence_length // self.context_gpus

    @property
    def tokens(self) -> int:
        """How many tokens a step reads."""
        return self.batch_size * self.sequence_length

    @property
    def seconds_in_turn(self) -> float:
        """Of a step whose resources work one after the other, products at the first of `SHARES`."""
        others = sum(seconds for name, seconds in self.seconds.items() if name != MATRIX_UNITS)
        # Links in a node and NICs carry one collective together: the slower of them counts.
        others -= min(self.seconds[name] for name in LINKS)
        return self.seconds[MATRIX_UNITS] / SHARES[0] + others

    @property
    def bound(self) -> str:
        """The resource that needs the most time."""
        return max(self.seconds, key=self.seconds.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """All collectives of a kind in a compiled step.

    Attributes:
      count: that a step runs.
      num_bytes: of all of them on one GPU.
      largest_bytes: of the largest array in one.
      dtypes: of all arrays, by HLO's names.
      overlapped_flops: of products scheduled between their starts and dones.
      overlapped_kernels: kernels scheduled there.
    """

    count: int
    num_bytes: int
    largest_bytes: int
    dtypes: tuple[str, ...]
    overlapped_flops: float
    overlapped_kernels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What a compiled step says.

    Attributes:
      memory: of a GPU.
      collectives: by kind.
      flops: of all products a GPU runs in a step.
      flops_by_scope: of those in each named scope.
      moved_bytes: that its kernels take from memory and put there.
      moved_bytes_by_scope: of those in each named scope.
      times: modelled, by the share of the peak that products reach.
      buffers: the largest: bytes, and the values that share them.
      num_kernels: that XLA made.
      problems: what is wrong with kernels, by name.
      compile_seconds: of XLA.
      wall_seconds: of the whole process.
    """

    memory: Memory
    collectives: dict[str, CollectiveKind]
    flops: float
    flops_by_scope: dict[str, float]
    moved_bytes: float
    moved_bytes_by_scope: dict[str, float]
    times: list[StepTime]
    buffers: list[tuple[int, str]]
    num_kernels: int
    problems: dict[str, list[str]]
    compile_seconds: float
    wall_seconds: float


def make_plan(config: Config, cluster: Cluster, *, measured: tuple[str, ...] = ()) -> Plan:
    """The arithmetic of a run.

    Args:
      config: of the run.
      cluster: that it runs on.
      measured: resources for which the cluster has measured figures.

    Raises:
      ValueError: if the batch cannot be shared evenly by the GPUs.
    """
    num_gpus, time, execution = cluster.num_gpus, config.data.sequence_length, config.execution
    check_batch_size(config.data.batch_size, execution.num_microbatches, num_gpus, execution.context_devices)
    rows = micro_batch(config, num_gpus)
    policies = {name: dataclasses.replace(config.execution, remat=name) for name in POLICIES}
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
        narrow_communication=communication(config, cluster, reduced_dtype="bfloat16"),
        seconds=step_seconds(config, cluster),
        measured=measured,
        gemms=gemms(config, num_gpus),
        saturating_flops=cluster.device.saturating_flops,
        data=data_rate(config),
    )


def train_step_job(config: Config, cluster: Cluster) -> Job:
    """The compilation of a run's train step."""
    return Job(program=PROGRAM, arguments={"config": dataclasses.asdict(config)}, cluster=cluster)


def read_compilation(compilation: Compilation, cluster: Cluster) -> CompiledStep:
    """What a compiled train step says."""
    program = Program(compilation.hlo)
    return CompiledStep(
        memory=compilation.memory,
        collectives=_by_kind(program.collectives),
        flops=program.flops(),
        flops_by_scope={scope: program.flops(scope) for scope in SCOPES},
        moved_bytes=moved_bytes(program),
        moved_bytes_by_scope={scope: moved_bytes(program, scope) for scope in SCOPES},
        times=[model_step(program, cluster, share) for share in SHARES],
        buffers=largest_buffers(compilation.buffers, NUM_BUFFERS),
        num_kernels=len(compilation.kernels),
        problems=_problems(compilation.kernels, cluster),
        compile_seconds=compilation.compile_seconds,
        wall_seconds=compilation.wall_seconds,
    )


def to_json(plan: Plan, step: CompiledStep | None = None, **more: Any) -> dict[str, Any]:
    """A plan, its compiled step and more as plain values, for `json.dumps`."""
    values = {"plan": dataclasses.asdict(plan)} | more
    return values if step is None else values | {"compiled": dataclasses.asdict(step)}


def _by_kind(collectives: list[Collective]) -> dict[str, CollectiveKind]:
    kinds = Counter(collective.kind for collective in collectives)
    return {kind: _sum([c for c in collectives if c.kind == kind]) for kind in sorted(kinds)}


def _sum(collectives: list[Collective]) -> CollectiveKind:
    return CollectiveKind(
        count=sum(c.runs for c in collectives),
        num_bytes=sum(c.runs * c.num_bytes for c in collectives),
        largest_bytes=max(c.largest_bytes for c in collectives),
        dtypes=tuple(sorted({dtype for c in collectives for dtype in c.dtypes})),
        overlapped_flops=math.fsum(c.runs * c.overlapped_flops for c in collectives),
        overlapped_kernels=sum(c.runs * c.overlapped_kernels for c in collectives),
    )


def _problems(kernels: tuple[Kernel, ...], cluster: Cluster) -> dict[str, list[str]]:
    found = {kernel.name: kernel.problems(cluster.device) for kernel in kernels}
    return {name: problems for name, problems in found.items() if problems}
