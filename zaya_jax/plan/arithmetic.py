"""Cost of a step by arithmetic alone: operations, bytes over links, time, and sizes of matrix products.

Sources: [ZAYA1-8B] appendix B (data); [ZAYA1-base] section III (the work that a product needs to reach the
peak of a MI300X, and the links that collectives use).
"""

import dataclasses
import math
from collections.abc import Iterator

from zaya_jax.config import Config, ExecutionConfig, ModelConfig
from zaya_jax.model.flops import float32_router_flops, forward_flops_per_token, train_flops_per_token
from zaya_jax.model.remat import group_size
from zaya_jax.model.weights import declare, flatten_weights
from zaya_jax.optim.by_layer import layers_per_message, shared_experts
from zaya_jax.optim.matrices import matrix_sides
from zaya_jax.optim.newton_schulz import newton_schulz_flops
from zaya_jax.optim.partition import MatrixPool, MatrixStack, Partition
from zaya_jax.parallel.bucket_layouts import BucketLayout
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.memory import (
    activation_bytes,
    bytes_by_bucket,
    expert_bytes,
    partition_of,
    state_bytes,
    sum_dtype,
    summed_bytes,
)
from zaya_jax.plan.shares import Exchange, exchange, micro_batch, num_groups, own_tokens, with_execution

LAYERS_AGAIN = {"block": 1, "layer": 1, "group": 2}
"""Number of times that a remat policy recomputes a whole layer; the others keep the outputs of products."""
ROUTERS_AGAIN = LAYERS_AGAIN | {"attention_and_experts": 1}
"""Number of times that a remat policy recomputes a router."""
MATRIX_UNITS, MEMORY, LINKS = "matrix units", "memory", ("links in the node", "network")
"""Resources of a GPU."""
PAGE_BYTES = 4096
TOKEN_BYTES = 4
DATA_IOPS = 70_000.0
"""Reads per second of the storage that ZAYA1 was trained from."""
SCATTER = 8.0
"""Reads per page of tokens when documents are scattered: 1 to 2 when packed, 8 in the worst case."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations; a multiply-add counts as two.

    Attributes:
      forward: FLOPs per token of the forward pass, by part of the network.
      training: FLOPs per token, forward and backward.
      recomputed: FLOPs per token that remat and attention's backward pass repeat.
      optimizer: FLOPs of a GPU's Newton-Schulz products per step.
      optimizer_replicated: the same if every GPU processed all matrices.
    """

    forward: dict[str, float]
    training: float
    recomputed: float
    optimizer: float
    optimizer_replicated: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes of a step's collectives with padding, and the estimated time of the links.

    Attributes:
      reduced_bytes: reduce-scattered gradients, padded to parts of equal size.
      reduced_dtype: dtype in which gradients are sent; sums are float32.
      gathered_bytes: all-gathered weights, padded to parts of equal size.
      expert_bytes: experts and their gradients that the GPUs of a node exchange in the layers.
      shared: bytes that the GPUs of a sequence exchange.
      link_seconds: estimated time of the links within a node.
      network_seconds: estimated time of the NICs, one per GPU; 0 on one node.
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
    """A matrix product of the step, as a GPU runs it.

    Attributes:
      name: name of the product.
      rows: rows of the left matrix.
      depth: contracted size.
      columns: columns of the right matrix.
      count: number of such products in one call.
    """

    name: str
    rows: int
    depth: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Operations of one call; a multiply-add counts as two."""
        return 2.0 * self.rows * self.depth * self.columns * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRate:
    """Data that a step reads ([ZAYA1-8B] appendix B).

    Attributes:
      pages: number of 4 KiB pages per step, if tokens are contiguous.
      shortest_step: seconds below which the storage limits the step, if tokens are contiguous.
      shortest_step_scattered: the same if each page costs several reads.
    """

    pages: float
    shortest_step: float
    shortest_step_scattered: float

    def iops(self, seconds: float) -> float:
        """Returns the reads per second at a step of the given duration."""
        return self.pages / seconds


def operations(config: Config, num_devices: int) -> Operations:
    """Returns the operations of all products of a step."""
    time = config.data.sequence_length
    steps = config.optimizer.newton_schulz_steps if config.optimizer.name == "muon" else 0
    # A partition over one device has all matrices, and no padding.
    whole = partition_of(with_execution(config, node_devices=1), 1)
    return Operations(
        forward=forward_flops_per_token(config.model, time),
        training=train_flops_per_token(config, time),
        recomputed=recomputed_flops(config.model, config.execution, time),
        optimizer=optimizer_flops(partition_of(config, num_devices), num_steps=steps),
        optimizer_replicated=optimizer_flops(whole, num_steps=steps),
    )


def recomputed_flops(config: ModelConfig, execution: ExecutionConfig, time: int) -> float:
    """FLOPs per token that the backward pass repeats.

    Attention's backward pass recomputes the scores under every policy ([FlashAttention] section 3.1).
    """
    forward = forward_flops_per_token(config, time)
    # FlashAttention never stores the scores, so every policy computes them a second time.
    scores = _score_flops(config, forward)
    layers = forward["attention"] + forward["experts"] + forward["router"]
    again = {
        "none": 0.0,
        # The outputs of all products are kept; what is left is element-wise and not counted.
        "products": 0.0,
        # The scores are not part of it, because they are added below for every policy.
        "attention_and_experts": forward["attention"] - scores + forward["router"],
        "block": layers,
        "layer": layers,
        # A group of several layers is repeated as a whole, and then each of its layers once more.
        "group": layers if group_size(config.num_hidden_layers) == 1 else 2 * layers,
    }
    # The backward pass repeats the scores, but not the product of the probabilities with the values.
    return again[execution.remat] + scores / 2


def communication(config: Config, cluster: Cluster, *, reduced_dtype: str | None = None) -> Communication:
    """Collectives of a step: within a node over all links, between nodes over each GPU's NIC.

    Args:
      config: config of the run.
      cluster: cluster of the run.
      reduced_dtype: dtype in which gradients are sent; None means the step's own.
    """
    reduced_dtype = reduced_dtype or sum_dtype(config)
    sent = messages(config, cluster.num_gpus, reduced_dtype=reduced_dtype)
    # `messages` returns reduce-scattered and all-gathered bytes in this order.
    reduced, gathered = (sum(sizes.values()) for sizes in sent.values())
    # Messages of a step are sent one after the other: their times add up.
    each = _sent_messages(config, cluster.num_gpus, sent)
    link = math.fsum(count * node_seconds(config, cluster, kind, size) for kind, size, count in each)
    each = _sent_messages(config, cluster.num_gpus, sent, layers=_layers_between(config, cluster.num_gpus))
    network = math.fsum(count * network_seconds(config, cluster, kind, size) for kind, size, count in each)
    # Each layer gathers and sums shared experts within the node; the first pass is already in `messages`.
    again, layers = experts_in_node(config), config.model.num_hidden_layers
    link += math.fsum(
        (passes - 1) * layers * node_seconds(config, cluster, kind, expert_bytes(config) / layers)
        for kind, passes in again.items()
    )
    of_links, of_network = estimate_context(config, cluster)
    return Communication(
        reduced_bytes=reduced,
        reduced_dtype=reduced_dtype,
        gathered_bytes=gathered,
        expert_bytes=sum(again.values()) * expert_bytes(config),
        shared=exchange(config, cluster.num_gpus),
        link_seconds=link + of_links,
        network_seconds=network + of_network,
    )


def _sent_messages(
    config: Config, num_gpus: int, sent: dict[str, dict[str, int]], *, layers: int = 1
) -> Iterator[tuple[str, float | int, int]]:
    """Yields kind, bytes and number of messages per step, as the step combines buckets.

    A message contains the experts of `layers` layers.
    """
    partition, count = partition_of(config, num_gpus), config.model.num_hidden_layers // layers
    layouts = {bucket.name: bucket.layout for bucket in partition.matrix_buckets}
    for kind, sizes in sent.items():
        matrices = {name: size for name, size in sizes.items() if name in layouts}
        shared = {name for name in matrices if layouts[name] is BucketLayout.OWN_EXPERTS}
        experts = sum(matrices[name] for name in shared)
        yield from ((kind, size, 1) for name, size in matrices.items() if name not in shared)
        # Layers send their own experts, see `zaya_jax.parallel.prefetch`.
        if experts:
            yield kind, experts / count, count
        # XLA combines the remaining weights, most of which are short vectors.
        if rest := sum(sizes.values()) - sum(matrices.values()):
            yield kind, rest, 1


def _layers_between(config: Config, num_gpus: int) -> int:
    """Layers whose experts share a message between nodes."""
    partition = partition_of(config, num_gpus)
    return layers_per_message(partition, config.execution.dtype) if shared_experts(partition) else 1


def node_seconds(config: Config, cluster: Cluster, kind: str, num_bytes: float | int) -> float:
    """Estimated time of a message of a step among the GPUs of a node.

    Args:
      config: config of the run.
      cluster: cluster of the run.
      kind: "reduce_scatter" for gradients or "all_gather" for weights.
      num_bytes: bytes of the message.
    """
    return cluster.links.in_node(_sent_as(config, kind), num_bytes, ranks=cluster.gpus_per_node)


def network_seconds(config: Config, cluster: Cluster, kind: str, num_bytes: float | int) -> float:
    """Estimated time of a message between nodes, see `node_seconds`."""
    # The message has already been reduced or scattered within the node, so that each GPU sends its part.
    part = num_bytes / cluster.gpus_per_node
    return cluster.links.between_nodes(_sent_as(config, kind), part, ranks=1, nodes=cluster.nodes)


def _sent_as(config: Config, kind: str) -> str:
    """The collective that the step uses: `zaya_jax.parallel.node` sums bfloat16 gradients after an
    all-to-all.
    """
    is_gradient = kind == "reduce_scatter"
    return "all_to_all" if is_gradient and config.execution.node_devices > 1 else kind


def estimate_context(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Estimated time of the links within a node and of the network for shared sequences."""
    ranks, execution = config.execution.context_devices, config.execution
    if ranks == 1:
        return 0.0, 0.0
    # Forward and backward pass of each layer exchange one message per microbatch, of about equal sizes.
    count = 2 * config.model.num_hidden_layers * execution.num_microbatches
    received = exchange(config, cluster.num_gpus).total / count
    in_node = min(ranks, cluster.gpus_per_node)
    if ranks <= cluster.gpus_per_node:
        # Received bytes exclude the GPU's own part of the message.
        message = received * ranks / (ranks - 1)
        return count * cluster.links.in_node("all_gather", message, ranks=in_node), 0.0
    # The exchange within the node runs at the same time and is faster, so the network determines the time.
    others = (ranks - in_node) / (ranks - 1)
    nodes = ranks // in_node
    message = received * others * nodes / (nodes - 1)
    return 0.0, count * cluster.links.between_nodes("all_gather", message, ranks=1, nodes=nodes)


def context_seconds(config: Config, cluster: Cluster) -> tuple[float, float]:
    """Minimum time of the links within a node and of the network for shared sequences."""
    shared, ranks = exchange(config, cluster.num_gpus), config.execution.context_devices
    if ranks == 1:
        return 0.0, 0.0
    if ranks <= cluster.gpus_per_node:
        # Each of the other GPUs sends its part over its own link, all at the same time.
        return shared.total / (ranks - 1) / cluster.device.link_bandwidth, 0.0
    others = (ranks - cluster.gpus_per_node) / (ranks - 1)
    return 0.0, shared.total * others / cluster.device.network_bandwidth


def experts_in_node(config: Config) -> dict[str, int]:
    """Number of times per step that a node gathers all experts and sums their gradients, by collective."""
    execution = config.execution
    if execution.node_devices == 1:
        return {}
    # Without remat the forward pass's experts stay in memory; each recomputation gathers them again.
    gathers = 1 if execution.remat == "none" else 2 + (execution.remat == "group")
    return {
        "all_gather": gathers * execution.num_microbatches,
        "reduce_scatter": execution.num_microbatches,
    }


def messages(config: Config, num_gpus: int, *, reduced_dtype: str | None = None) -> dict[str, dict[str, int]]:
    """Bytes of each message of a step by collective and bucket; empty for a single GPU.

    Args:
      config: config of the run.
      num_gpus: number of GPUs that the optimizer state is partitioned over.
      reduced_dtype: dtype in which gradients are sent; None means the step's own.
    """
    if num_gpus == 1:
        return {"reduce_scatter": {}, "all_gather": {}}
    return {
        "reduce_scatter": bytes_by_bucket(config, num_gpus, reduced_dtype or sum_dtype(config)),
        "all_gather": bytes_by_bucket(config, num_gpus, config.execution.dtype, frozen=True),
    }


def step_flops(config: Config, num_gpus: int) -> float:
    """FLOPs of a GPU's products in a step, including recomputation and the optimizer."""
    work = operations(config, num_gpus)
    # GPUs that share a sequence share its FLOPs, so the number of groups does not matter here.
    tokens = config.data.batch_size * config.data.sequence_length / num_gpus
    return (work.training + work.recomputed) * tokens + work.optimizer


def float32_flops(config: Config, num_gpus: int) -> float:
    """FLOPs, of those of `step_flops`, of products with float32 operands."""
    work = operations(config, num_gpus)
    if config.execution.dtype == "float32":
        per_token = work.training + work.recomputed
    else:
        # Forward, and backward for both operands.
        passes = 3 + ROUTERS_AGAIN.get(config.execution.remat, 0)
        per_token = passes * float32_router_flops(config.model)
    tokens = config.data.batch_size * config.data.sequence_length / num_gpus
    return per_token * tokens + work.optimizer * (config.optimizer.newton_schulz_dtype == "float32")


def step_seconds(config: Config, cluster: Cluster) -> dict[str, float]:
    """Estimated time of each resource for a step: products and memory at full or measured rate, links by the
    cluster's case or measurements.

    Messages include padding. For lower bounds see `zaya_jax.plan.bounds`.
    """
    device, links = cluster.device, communication(config, cluster)
    flops, in_float32 = (count(config, cluster.num_gpus) for count in (step_flops, float32_flops))
    return {
        MATRIX_UNITS: (flops - in_float32) / device.matrix_flops + in_float32 / device.float32_flops,
        MEMORY: memory_traffic(config, cluster.num_gpus) / device.memory_bandwidth,
        **dict(zip(LINKS, (links.link_seconds, links.network_seconds), strict=True)),
    }


def seconds_in_turn(seconds: dict[str, float], product_share: float) -> dict[str, float]:
    """Returns the seconds of each resource if products reach only a share of their peak."""
    return seconds | {MATRIX_UNITS: seconds[MATRIX_UNITS] / product_share}


def memory_traffic(config: Config, num_devices: int) -> int:
    """Minimum bytes that a GPU moves to and from its memory in a step.

    Each microbatch reads the weights in the forward pass, in the backward pass for both gradients, and once
    more for each recomputation of the layers. It writes its gradients, and writes and reads the kept
    activations. The state is read and written once per step.
    """
    state = state_bytes(config, num_devices)
    microbatches = config.execution.num_microbatches
    rows = config.data.batch_size // num_groups(config, num_devices)
    sent_copies = summed_bytes(config, num_devices)
    # The forward pass reads the weights once; the backward pass reads them for the gradients of inputs.
    reads = 2 + LAYERS_AGAIN.get(config.execution.remat, 0)
    # Experts of other GPUs are written when they are gathered, and read when they are used or summed.
    others = expert_bytes(config) * (config.execution.node_devices - 1) // config.execution.node_devices
    gathers = sum(experts_in_node(config).values())
    kept = activation_bytes(config.model, config.execution, own_tokens(config))
    return (
        # With several microbatches each one also reads the sum of the gradients before it.
        microbatches * (reads * state.weights + state.gradients * (1 if microbatches == 1 else 2))
        + microbatches * reads * others
        + 2 * gathers * others
        # Written by the forward pass, and read by the backward pass.
        + 2 * rows * kept
        + state.gradients
        + 2 * sent_copies  # written in the wider dtype, and read by the reduce-scatter
        + 2 * state.own_gradients
        # Read and written by the optimizer.
        + 2 * (state.master + state.frozen + state.moments + state.ema)
        + norm_traffic(config, num_devices)
        + state.weights  # written by the all-gather
    )


def norm_traffic(config: Config, num_devices: int) -> int:
    """Bytes that a GPU reads for norms of matrices and neurons, which precede the update of any element."""
    # NorMuon reads the orthogonalized update once more; hyperball the update and the weights.
    reads = config.optimizer.normuon + 2 * config.optimizer.hyperball
    sizes = bytes_by_bucket(config, num_devices, "float32")
    matrices = partition_of(config, num_devices).matrix_buckets
    return reads * sum(sizes[bucket.name] for bucket in matrices) // num_devices


def gemms(config: Config, num_devices: int) -> list[Gemm]:
    """Matrix products of a step's forward pass and of the optimizer, as a GPU runs them."""
    model = config.model
    tokens = micro_batch(config, num_devices) * own_tokens(config)
    # CCA convolves queries and keys together.
    heads = model.num_attention_heads + model.num_key_value_heads
    width, expert, latent = model.hidden_size, model.moe_intermediate_size, model.head_dim
    queries, keys = model.num_attention_heads * latent, model.num_key_value_heads * latent
    # The taps of the second convolution are concatenated, so that each head is one product.
    a_head = {"rows": tokens, "depth": model.cca_time1 * latent, "columns": latent, "count": heads}
    # Balanced routing: every expert gets an equal share of the tokens.
    an_expert = tokens // model.num_experts
    products = [
        Gemm(name="queries", rows=tokens, depth=width, columns=queries),
        Gemm(name="keys", rows=tokens, depth=width, columns=keys),
        # CCA makes half of the values from the token before, hence two products ([CCA] section II-B).
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
    partition = partition_of(config, num_devices)
    if config.optimizer.name == "muon" and partition.matrix_buckets:
        # The Gram matrix is that of the shorter side, whichever axis it is.
        sides = [sorted(matrix_sides(bucket.shape, bucket.axes)) for bucket in partition.matrix_buckets]
        counts = [_matrices_per_device(partition, bucket) for bucket in partition.matrix_buckets]
        # Only the largest matrices matter for the time of Newton-Schulz.
        short, long = max(sides, key=math.prod)
        count = max(count for count, side in zip(counts, sides, strict=True) if side == [short, long])
        products.append(Gemm(name="Newton-Schulz, Gram", rows=short, depth=long, columns=short, count=count))
    return products


def data_rate(config: Config) -> DataRate:
    """Pages per step, and the step time at which the storage of [ZAYA1-8B] appendix B becomes the limit."""
    # Each token is stored as four bytes, as in [ZAYA1-8B] appendix B.
    pages = config.data.batch_size * config.data.sequence_length * TOKEN_BYTES / PAGE_BYTES
    return DataRate(
        pages=pages, shortest_step=pages / DATA_IOPS, shortest_step_scattered=SCATTER * pages / DATA_IOPS
    )


def _score_flops(config: ModelConfig, forward: dict[str, float]) -> float:
    """FLOPs per token of scores and weighted values: the part of attention that is not a product with a
    weight.
    """
    weights = sum(
        2.0 * weight.size
        for path, weight in flatten_weights(declare(config)).items()
        if path.startswith("layers/attention/") and (weight.matrix or path.endswith("kernel"))
    )
    return forward["attention"] - weights


def _matrices_per_device(partition: Partition, bucket: MatrixStack | MatrixPool) -> int:
    """Number of a bucket's matrices that a device orthogonalizes: those of its whole node where its devices
    share rows.
    """
    # Matrices outside the shared experts are spread over all devices.
    everywhere = bucket.layout is BucketLayout.ALL_DEVICES
    owners = partition.num_devices // (1 if everywhere else partition.node_devices)
    return math.prod(bucket.shape) // math.prod(matrix_sides(bucket.shape, bucket.axes)) // owners


def optimizer_flops(partition: Partition, *, num_steps: int) -> float:
    """FLOPs of Newton-Schulz per device; all devices have equally many matrices, including padding."""
    total = 0
    for bucket in partition.matrix_buckets:
        sides = matrix_sides(bucket.shape, bucket.axes)
        count = _matrices_per_device(partition, bucket)
        # Padding is orthogonalized too: parts of unequal size would need a program for each device.
        total += count * newton_schulz_flops(*sides, num_steps=num_steps)
    return float(total)
