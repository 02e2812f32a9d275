"""What a step costs, by arithmetic alone: operations, bytes over links, time, sizes of products.

Sources: [ZAYA1-8B] appendix B (data); [ZAYA1-base] section III (the work that a product needs to reach a
MI300X's peak, links that collectives use).
"""

import dataclasses
import math

from zaya_jax.config import Config, ExecutionConfig, ModelConfig
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.flops import forward_flops_per_token, train_flops_per_token
from zaya_jax.model.remat import group_size
from zaya_jax.model.weights import declare, flatten_weights
from zaya_jax.optim.matrices import matrix_sides
from zaya_jax.optim.newton_schulz import newton_schulz_flops
from zaya_jax.optim.partition import MatrixPool, MatrixStack, Partition, make_partition
from zaya_jax.parallel.layouts import BucketLayout
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.memory import (
    activation_bytes,
    bytes_by_bucket,
    expert_bytes,
    state_bytes,
    sum_dtype,
    summed_bytes,
)
from zaya_jax.plan.shares import Exchange, exchange, micro_batch, num_groups, own_tokens

LAYERS_AGAIN = {"block": 1, "layer": 1, "group": 2}
"""How often a policy computes all of a layer once more; the others keep what its weights made."""
MATRIX_UNITS, LINKS = "matrix units", ("links in the node", "network")
"""Resources of a GPU; memory is another."""
PAGE_BYTES = 4096
TOKEN_BYTES = 4
DATA_IOPS = 70_000.0
"""Reads a second of the storage that ZAYA1 was trained from."""
SCATTER = 8.0
"""Reads a page of tokens can cost when documents lie about: 1 to 2 when packed, 8 at worst."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations; a multiply and an add are two.

    Attributes:
      forward: of a token, by part of the network.
      training: of a token, forward and backward.
      recomputed: of a token, by remat and by attention's backward pass.
      optimizer: of a GPU's Newton-Schulz products, a step.
      optimizer_replicated: the same if every GPU did all matrices.
    """

    forward: dict[str, float]
    training: float
    recomputed: float
    optimizer: float
    optimizer_replicated: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes of a step's collectives, and the least time that links need for them.

    Attributes:
      reduced_bytes: gradients, reduce-scattered; padded to parts of equal size.
      reduced_dtype: in which they travel; sums are float32.
      gathered_bytes: weights, all-gathered; padded likewise.
      expert_bytes: of experts, and their gradients, that the GPUs of a node send each other in the layers.
      shared: what the GPUs of a sequence send each other.
      link_seconds: that the links within a node need, all of which take part.
      network_seconds: that the NICs need, one a GPU; 0 on one node.
    """

    reduced_bytes: int
    reduced_dtype: str
    gathered_bytes: int
    expert_bytes: int
    shared: Exchange
    link_seconds: float
    network_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """A product of matrices in the step, as a GPU runs it.

    Attributes:
      name: of it.
      rows: of the left matrix.
      depth: contracted.
      columns: of the right matrix.
      count: how many such products are one call.
    """

    name: str
    rows: int
    depth: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Operations of one call, a multiply and an add counted as two."""
        return 2.0 * self.rows * self.depth * self.columns * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRate:
    """What a step reads ([ZAYA1-8B] appendix B).

    Attributes:
      pages: of 4 KiB, a step, when tokens lie together.
      shortest_step: seconds below which the storage would be the limit, when they lie together.
      shortest_step_scattered: the same when each page costs several reads.
    """

    pages: float
    shortest_step: float
    shortest_step_scattered: float

    def iops(self, seconds: float) -> float:
        """Reads a second at a step of so many seconds."""
        return self.pages / seconds


def operations(config: Config, num_devices: int) -> Operations:
    """All products of a step."""
    time = config.data.sequence_length
    steps = config.optimizer.newton_schulz_steps if config.optimizer.name == "muon" else 0
    return Operations(
        forward=forward_flops_per_token(config.model, time),
        training=train_flops_per_token(config, time),
        recomputed=recomputed_flops(config.model, config.execution, time),
        optimizer=optimizer_flops(_partition(config, num_devices), num_steps=steps),
        optimizer_replicated=optimizer_flops(_partition(with_node_devices(config, 1), 1), num_steps=steps),
    )


def recomputed_flops(config: ModelConfig, execution: ExecutionConfig, time: int) -> float:
    """Of a token: what the backward pass computes a second time.

    Attention's backward pass forms the scores anew under every policy ([FlashAttention] section 3.1).
    """
    forward = forward_flops_per_token(config, time)
    scores = _score_flops(config, forward)
    layers = forward["attention"] + forward["experts"] + forward["router"]
    again = {
        "none": 0.0,
        "products": 0.0,
        "attention_and_experts": forward["attention"] - scores + forward["router"],
        "block": layers,
        "layer": layers,
        "group": layers if group_size(config.num_hidden_layers) == 1 else 2 * layers,
    }
    return again[execution.remat] + scores / 2


def communication(config: Config, cluster: Cluster, *, reduced_dtype: str | None = None) -> Communication:
    """Collectives of a step: within a node over all links, between nodes over each GPU's own NIC.

    Args:
      config: of the run.
      cluster: that it runs on.
      reduced_dtype: in which gradients travel; None for the step's own, another to compare.
    """
    reduced_dtype = reduced_dtype or sum_dtype(config)
    sent = messages(config, cluster.num_gpus, reduced_dtype=reduced_dtype)
    reduced, gathered = (sum(sizes.values()) for sizes in sent.values())
    each = [(kind, size) for kind, sizes in sent.items() for size in sizes.values()]
    link = math.fsum(cluster.node_seconds(*message) for message in each)
    network = math.fsum(cluster.network_seconds(*message) for message in each)
    gpus, device = cluster.gpus_per_node, cluster.device
    # What layers gather and sum within a node need not travel there again with the rest.
    again = experts_in_node(config)
    link += math.fsum(
        (passes - 1) * cluster.node_seconds(kind, expert_bytes(config)) for kind, passes in again.items()
    )
    shared, ranks = exchange(config, cluster.num_gpus), config.execution.context_devices
    if 1 < ranks <= gpus:
        link += shared.total / (ranks - 1) / device.link_bandwidth
    elif ranks > 1:  # what is within a node as well comes beside it, and sooner
        network += shared.total * (ranks - gpus) / (ranks - 1) / device.network_bandwidth
    return Communication(
        reduced_bytes=reduced,
        reduced_dtype=reduced_dtype,
        gathered_bytes=gathered,
        expert_bytes=sum(again.values()) * expert_bytes(config),
        shared=shared,
        link_seconds=link,
        network_seconds=network,
    )


def experts_in_node(config: Config) -> dict[str, int]:
    """How often a step gathers all experts in a node, and sums their gradients there, by collective."""
    execution = config.execution
    if execution.node_devices == 1:
        return {}
    gathers = 1 if execution.remat == "none" else 2 + (execution.remat == "group")
    return {
        "all_gather": gathers * execution.num_microbatches,
        "reduce_scatter": execution.num_microbatches,
    }


def messages(config: Config, num_gpus: int, *, reduced_dtype: str | None = None) -> dict[str, dict[str, int]]:
    """Bytes of each message of a step by collective and bucket; none on a GPU alone.

    Args:
      config: of the run.
      num_gpus: that share the optimiser.
      reduced_dtype: in which gradients travel; None for the step's own.
    """
    if num_gpus == 1:
        return {"reduce_scatter": {}, "all_gather": {}}
    return {
        "reduce_scatter": bytes_by_bucket(config, num_gpus, reduced_dtype or sum_dtype(config)),
        "all_gather": bytes_by_bucket(config, num_gpus, config.execution.dtype, frozen=True),
    }


def step_seconds(config: Config, cluster: Cluster) -> dict[str, float]:
    """The least time that each resource of a GPU needs for a step, by resource."""
    device = cluster.device
    work = operations(config, cluster.num_gpus)
    tokens = config.data.batch_size * config.data.sequence_length / cluster.num_gpus
    links = communication(config, cluster)
    flops = (work.training + work.recomputed) * tokens + work.optimizer
    return {
        MATRIX_UNITS: flops / device.matrix_flops,
        "memory": memory_traffic(config, cluster.num_gpus) / device.memory_bandwidth,
        **dict(zip(LINKS, (links.link_seconds, links.network_seconds), strict=True)),
    }


def memory_traffic(config: Config, num_devices: int) -> int:
    """Bytes that a GPU must at least move to and from its memory in a step.

    Each microbatch reads the weights forward, backward for both gradients, and once more each time that
    the layers are recomputed; it writes its gradients, and writes and reads the kept activations. Once a
    step the state is read and written.
    """
    state = state_bytes(config, num_devices)
    microbatches = config.execution.num_microbatches
    rows = config.data.batch_size // num_groups(config, num_devices)
    on_their_way = summed_bytes(config, num_devices)
    reads = 2 + LAYERS_AGAIN.get(config.execution.remat, 0)
    # Of shared experts the others' are written where they are gathered, read and summed where they are used.
    others = expert_bytes(config) * (config.execution.node_devices - 1) // config.execution.node_devices
    gathers = sum(experts_in_node(config).values())
    kept = activation_bytes(config.model, config.execution, own_tokens(config))
    return (
        microbatches * (reads * state.weights + state.gradients * (1 if microbatches == 1 else 2))
        + microbatches * reads * others
        + 2 * gathers * others
        + 2 * rows * kept
        + state.gradients
        + 2 * on_their_way  # read by the reduce-scatter, or made wider for it
        + 2 * state.own_gradients
        + 2 * (state.master + state.moments)
        + state.weights  # written by the all-gather
    )


def gemms(config: Config, num_devices: int) -> list[Gemm]:
    """The products of a step's forward pass and of the optimiser, as a GPU runs them."""
    model = config.model
    tokens = micro_batch(config, num_devices) * own_tokens(config)
    heads = model.num_attention_heads + model.num_key_value_heads
    width, expert, latent = model.hidden_size, model.moe_intermediate_size, model.head_dim
    queries, keys = model.num_attention_heads * latent, model.num_key_value_heads * latent
    a_head = {"rows": tokens, "depth": model.cca_time1 * latent, "columns": latent, "count": heads}
    an_expert = tokens // model.num_experts
    products = [
        Gemm(name="queries", rows=tokens, depth=width, columns=queries),
        Gemm(name="keys", rows=tokens, depth=width, columns=keys),
        Gemm(name="values, each half", rows=tokens, depth=width, columns=keys // 2),
        Gemm(name="convolution of all heads", **a_head),
        Gemm(name="attention's output", rows=tokens, depth=queries, columns=width),
        Gemm(name="router's first", rows=tokens, depth=width, columns=model.router_hidden_size),
        Gemm(name="gate and up of all experts", rows=an_expert, depth=width, columns=2 * expert,
             count=model.num_experts),
        Gemm(name="down of all experts", rows=an_expert, depth=expert, columns=width,
             count=model.num_experts),
        Gemm(name="logits of a chunk", rows=min(config.execution.loss_chunk, tokens), depth=width,
             columns=model.vocab_size),
    ]  # fmt: skip
    partition = _partition(config, num_devices)
    if config.optimizer.name == "muon" and partition.matrix_buckets:
        sides = [sorted(matrix_sides(bucket.shape, bucket.axes)) for bucket in partition.matrix_buckets]
        counts = [_matrices_a_device(partition, bucket) for bucket in partition.matrix_buckets]
        short, long = max(sides, key=math.prod)
        count = max(count for count, side in zip(counts, sides, strict=True) if side == [short, long])
        products.append(Gemm(name="Newton-Schulz, Gram", rows=short, depth=long, columns=short, count=count))
    return products


def data_rate(config: Config) -> DataRate:
    """Pages a step, and where the storage of [ZAYA1-8B] appendix B would become the limit."""
    pages = config.data.batch_size * config.data.sequence_length * TOKEN_BYTES / PAGE_BYTES
    return DataRate(
        pages=pages, shortest_step=pages / DATA_IOPS, shortest_step_scattered=SCATTER * pages / DATA_IOPS
    )


def _score_flops(config: ModelConfig, forward: dict[str, float]) -> float:
    """Of a token's scores and weighted values: what is not a product with a weight."""
    weights = sum(
        2.0 * weight.size
        for path, weight in flatten_weights(declare(config)).items()
        if path.startswith("layers/attention/") and (weight.matrix or path.endswith("kernel"))
    )
    return forward["attention"] - weights


def _partition(config: Config, num_devices: int) -> Partition:
    return make_partition(
        declare_run(config),
        num_devices,
        node_devices=config.execution.node_devices,
        by_matrix=config.optimizer.name == "muon",
    )


def with_node_devices(config: Config, count: int) -> Config:
    """The same run, so many devices of a node sharing its experts."""
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, node_devices=count))


def _matrices_a_device(partition: Partition, bucket: MatrixStack | MatrixPool) -> int:
    """How many matrices of a bucket a device orthogonalises: all of its node, where they share rows."""
    everywhere = bucket.layout is BucketLayout.ALL_DEVICES
    owners = partition.num_devices // (1 if everywhere else partition.node_devices)
    return math.prod(bucket.shape) // math.prod(matrix_sides(bucket.shape, bucket.axes)) // owners


def optimizer_flops(partition: Partition, *, num_steps: int) -> float:
    """Of Newton-Schulz on each device: all have equally many matrices, padded ones included."""
    total = 0
    for bucket in partition.matrix_buckets:
        sides = matrix_sides(bucket.shape, bucket.axes)
        count = _matrices_a_device(partition, bucket)
        total += count * newton_schulz_flops(*sides, num_steps=num_steps)
    return float(total)
