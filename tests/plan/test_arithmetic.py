"""The arithmetic of a plan, compared with published figures and sums by hand."""

import contextlib
import dataclasses
import math

import jax
import pytest

from zaya_jax.options import load_config
from zaya_jax.plan import memory
from zaya_jax.plan.arithmetic import (
    communication,
    data_rate,
    float32_flops,
    gemms,
    memory_traffic,
    operations,
    recomputed_flops,
    step_flops,
    step_seconds,
)
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.memory import (
    POLICIES,
    activation_bytes,
    kept_shapes,
    memory_by_kind,
    state_bytes,
)
from zaya_jax.plan.output.plan import make_plan
from zaya_jax.plan.shares import for_platform, with_execution

PARAMETERS = 8_840_488_784
"""Values in all tensors of ZAYA1-8B in [Weights], without the balancing biases."""


@pytest.fixture(scope="module")
def shared():
    """The published recipe: experts shared by the 8 GPUs of a node."""
    return load_config("configs/zaya1_8b.py", [])


@pytest.fixture(scope="module")
def zaya1_8b(shared):
    """The recipe with all weights on each GPU."""
    return with_execution(shared, node_devices=1)


def cluster(nodes):
    return Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)


def newton_schulz(rows, columns):
    """Per step: x x^T, its square, and their product with x."""
    short, long = sorted((rows, columns))
    return 5 * (2 * short * short * long + 2 * short**3 + 2 * short * short * long)


def test_the_amount_of_data_is_that_of_the_report(zaya1_8b):
    """[ZAYA1-8B] appendix B: 64 MiB, 16,384 pages, 6,554 IOPS at 2.5 s, break-even at 0.234 s."""
    data = data_rate(zaya1_8b)
    assert data.pages == 16_384
    assert data.iops(2.5) == pytest.approx(6_554, abs=1)
    assert data.shortest_step == pytest.approx(0.234, abs=1e-3)
    assert data.shortest_step_scattered == pytest.approx(8 * 0.234, abs=1e-2)


def test_a_frozen_matrix_has_no_gradient_to_compute(zaya1_8b):
    """A third of the work of a product with a weight is its gradient; scores have no weight."""
    experts = 40 * 2 * (2048 * 4096 + 2048 * 2048)
    head = 2 * 262_272 * 2048
    queries = 40 * 2 * 2048 * 1024
    scores = 40 * 4 * 1024 * (4096 + 1) / 2
    forward = sum(operations(zaya1_8b, 8).forward.values())

    def training(**sections):
        changed = {name: dataclasses.replace(getattr(zaya1_8b, name), **s) for name, s in sections.items()}
        return operations(dataclasses.replace(zaya1_8b, **changed), 8).training

    assert training() == pytest.approx(3 * forward)
    frozen = training(optimizer={"frozen": ("layers/experts/*", "embedding/*")})
    assert frozen == pytest.approx(3 * forward - experts - head)
    # The gradient of a matrix with an adapter is computed, because its factors' gradients follow from it.
    assert training(lora={"rank": 8}) == pytest.approx(3 * forward - experts - head - _convolutions())
    of_queries = training(lora={"rank": 8, "targets": ("layers/attention/q_proj",)})
    assert of_queries == pytest.approx(3 * scores + 2 * (forward - scores) + queries)


def _convolutions():
    """Adapters exclude them: two taps of 10 heads of 128 channels, each channel alone, then within a head."""
    return 40 * 2 * (2 * 1280 + 10 * 2 * 128 * 128)


def test_the_optimiser_is_shared(zaya1_8b):
    """Shapes as in the released checkpoint ([Weights], ZAYA1-8B)."""
    a_layer = [(1024, 2048), (256, 2048), (128, 2048), (128, 2048), (2048, 1024)]
    a_layer += [(256, 2048), (256, 256), (256, 256), (17, 256)]
    a_layer += 16 * [(2048, 2048), (2048, 2048), (2048, 2048)]
    replicated = 40 * sum(newton_schulz(*sides) for sides in a_layer)
    on_8, on_1024 = operations(zaya1_8b, 8), operations(zaya1_8b, 1024)
    assert on_8.optimizer_replicated == on_1024.optimizer_replicated == replicated
    assert on_8.optimizer == replicated / 8
    # 1,920 matrices of experts on 1,024 GPUs: two each, because all GPUs pad to the largest share.
    two_experts = 2 * newton_schulz(2048, 2048)
    assert two_experts <= on_1024.optimizer < two_experts + replicated / 20_000
    assert on_1024.optimizer < replicated / 500


def test_adamw_has_no_products(zaya1_8b):
    adamw = dataclasses.replace(zaya1_8b, optimizer=dataclasses.replace(zaya1_8b.optimizer, name="adamw"))
    assert operations(adamw, 8).optimizer == 0
    assert not [gemm for gemm in gemms(adamw, 8) if "Newton" in gemm.name]


@pytest.mark.parametrize("num_devices", [1, 8, 1024])
def test_state_is_shared(zaya1_8b, num_devices):
    state = state_bytes(zaya1_8b, num_devices)
    assert state.master == pytest.approx(4 * PARAMETERS / num_devices, rel=0.2)  # padding, at 1,024
    # Muon has one moment, AdamW two; AdamW trains the embedding.
    assert state.moments == pytest.approx(4 * (PARAMETERS + 262_272 * 2048) / num_devices, rel=0.2)
    assert state.weights == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert state.gradients in (
        pytest.approx(4 * PARAMETERS, rel=1e-3),
        pytest.approx(2 * PARAMETERS, rel=1e-3),
    )


def test_normuon_has_a_value_per_neuron_and_norms_are_read_once_more():
    """Outputs of configs/tiny.py: of attention, the router and 4 experts in 2 layers."""
    tiny = load_config("configs/tiny.py", [])

    def switched(**switches):
        return dataclasses.replace(tiny, optimizer=dataclasses.replace(tiny.optimizer, **switches))

    muon, normuon, muonh = tiny, switched(normuon=True), switched(hyperball=True)
    neurons = 2 * (128 + 64 + 2 * 32 + 128 + 3 * 32 + 5 + 4 * (2 * 256 + 128))
    matrices = 2 * (128 * (128 + 64 + 2 * 32 + 128) + 32 * (128 + 2 * 32 + 5) + 4 * 3 * 128 * 256)
    # A single device pads nothing.
    states = [state_bytes(each, 1) for each in (muon, normuon, muonh)]
    assert states[1].moments - states[0].moments == 4 * neurons
    assert states[2] == states[0]
    traffic = [memory_traffic(each, 1) for each in (muon, normuon, muonh)]
    assert traffic[1] - traffic[0] == 4 * matrices + 2 * 4 * neurons
    assert traffic[2] - traffic[0] == 2 * 4 * matrices


def test_remat_keeps_less_and_computes_more(zaya1_8b):
    executions = [dataclasses.replace(zaya1_8b.execution, remat=remat) for remat in POLICIES]
    kept = [activation_bytes(zaya1_8b.model, execution, 4096) for execution in executions]
    again = [recomputed_flops(zaya1_8b.model, execution, 4096) for execution in executions]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert again == sorted(again)
    # With "layer" the stream and the router's state stay, float32, and little else; with "group" those of
    # each fifth layer.
    stream = 40 * 4096 * 4 * (2048 + 256)
    by_policy = dict(zip(POLICIES, kept, strict=True))
    assert stream <= by_policy["layer"] < 1.1 * stream
    assert by_policy["layer"] - by_policy["group"] == pytest.approx(stream * 4 / 5, rel=1e-2)


def test_a_group_in_recomputation_has_its_own_streams_weights_and_gradients(zaya1_8b):
    layer, group = (
        memory_by_kind(
            dataclasses.replace(zaya1_8b, execution=dataclasses.replace(zaya1_8b.execution, remat=remat)),
            1024,
        )
        for remat in ("layer", "group")
    )
    at_work = group["temporary arrays of a layer"] - layer["temporary arrays of a layer"]
    assert at_work == pytest.approx(5 * 4 * 4096 * 4 * (2048 + 256), rel=0.1)
    copies = "weights and gradients of a group of layers"
    assert layer[copies] == 0
    embedding = 262_272 * 2048
    assert group[copies] == pytest.approx(5 / 40 * 2 * 2 * (PARAMETERS - embedding), rel=1e-2)


@pytest.mark.parametrize("width", [128, 127, 127 * 131])
@pytest.mark.parametrize("remat", ["none", "layer", "group"])
def test_activations_are_what_a_second_sequence_adds(remat, width):
    """Also if sizes of weights are multiples of the primes that identify the batch axis."""
    tiny = load_config("configs/tiny.py", [])
    model = dataclasses.replace(tiny.model, moe_intermediate_size=width)
    network = model, dataclasses.replace(tiny.execution, remat=remat)
    one, two = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept_shapes(*network, batch, 64)))
        for batch in (1, 2)
    )
    assert activation_bytes(*network, 64) == two - one


@pytest.mark.parametrize("remat", ["none", "products", "group"])
def test_what_is_kept_does_not_depend_on_tracing_kernels(remat, monkeypatch):
    config = for_platform(load_config("configs/tiny.py", []), "rocm")
    network = config.model, dataclasses.replace(config.execution, remat=remat)
    without = jax.tree.leaves(kept_shapes(*network, 2, 64))
    monkeypatch.setattr(memory, "execute_launches", lambda executor: contextlib.nullcontext())
    traced = jax.tree.leaves(kept_shapes(*network, 2, 64))
    assert [(x.shape, x.dtype) for x in without] == [(x.shape, x.dtype) for x in traced]


def test_activations_grow_linearly(zaya1_8b):
    """No term grows with T x T: a sequence twice as long needs twice as much."""
    short, long = (activation_bytes(zaya1_8b.model, zaya1_8b.execution, time) for time in (4096, 8192))
    assert long == pytest.approx(2 * short, rel=1e-2)


def test_communication_by_hand(zaya1_8b):
    alone = communication(zaya1_8b, Cluster(device=MI300X, nodes=1, gpus_per_node=1))
    assert alone.reduced_bytes == alone.gathered_bytes == 0
    node, many = communication(zaya1_8b, cluster(1)), communication(zaya1_8b, cluster(128))
    assert node.gathered_bytes == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert 1 < many.gathered_bytes / (2 * PARAMETERS) < 1.1  # 1,920 matrices, padded to 2,048
    assert node.network_seconds == 0
    # 7/8 of all leaves a GPU over 7 links of 64 GB/s, 127/128 of an eighth over 400 Gb/s; [RCCL-runs] reach
    # 315 of 448 and 353 of 400 GB/s with large messages.
    sent = node.reduced_bytes + node.gathered_bytes
    assert node.link_seconds == pytest.approx(sent * 7 / 8 / 315e9, rel=0.02)
    sent = many.reduced_bytes + many.gathered_bytes
    at_353 = sent / 8 * 127 / 128 / (353e9 / 8)
    assert at_353 < many.network_seconds < 1.15 * at_353


def test_shared_experts_by_hand(shared, zaya1_8b):
    """Of 16 experts a layer a GPU stores 2; 240 matrices on 128 nodes are 2 each, with a fifteenth more."""
    experts = 40 * 16 * 3 * 2048 * 2048
    own, plain = state_bytes(shared, 1024), state_bytes(zaya1_8b, 1024)
    assert own.weights == plain.weights - 2 * experts * 7 / 8
    assert own.gradients == plain.gradients - 2 * experts * 7 / 8
    result = communication(shared, cluster(128))
    # Forward, once more for the backward pass, and gradients; in bfloat16.
    assert result.expert_bytes == 3 * 2 * experts
    assert result.gathered_bytes == pytest.approx(2 * (PARAMETERS + experts / 15), rel=0.02)
    assert result.reduced_dtype == "bfloat16"
    # Two layers at a time gather the experts of other nodes, and send their gradients by an all-to-all.
    links, layers = cluster(128).links, 2 * experts / 20 * 16 / 15
    rest = result.gathered_bytes - 20 * layers
    assert result.network_seconds == pytest.approx(
        math.fsum(
            20 * links.between_nodes(kind, layers / 8, ranks=1, nodes=128)
            + links.between_nodes(kind, rest / 8, ranks=1, nodes=128)
            for kind in ("all_gather", "all_to_all")
        ),
        rel=0.05,
    )
    # Within a node the layers gather experts once more than nodes must receive them from each other.
    at_315 = (result.gathered_bytes + 2 * experts + 1.855 * result.gathered_bytes) * 7 / 8 / 315e9
    assert result.link_seconds == pytest.approx(at_315, rel=0.05)
    assert memory_by_kind(shared, 1024)["gathered experts"] == 3 * 2 * experts // 40
    assert memory_by_kind(with_execution(shared, remat="none"), 1024)["gathered experts"] == 2 * experts
    assert "gathered experts" not in memory_by_kind(zaya1_8b, 1024)


def test_every_microbatch_gathers_experts_again(shared):
    def result(**changes):
        execution = dataclasses.replace(shared.execution, **changes)
        return communication(dataclasses.replace(shared, execution=execution), cluster(128))

    one = result()
    assert result(num_microbatches=2).expert_bytes == 2 * one.expert_bytes
    assert result(num_microbatches=2).network_seconds == one.network_seconds  # weights are sent once per step
    assert result(remat="none").expert_bytes == 2 / 3 * one.expert_bytes
    assert result(remat="group").expert_bytes == 4 / 3 * one.expert_bytes


def test_the_optimiser_of_nodes(shared, zaya1_8b):
    """Each GPU orthogonalizes two matrices of experts, as without sharing, and the other matrices of its
    node.
    """
    on_nodes, alone = operations(shared, 1024), operations(zaya1_8b, 1024)
    assert on_nodes.optimizer_replicated == alone.optimizer_replicated
    assert 1 < on_nodes.optimizer / alone.optimizer < 1.15


def test_products_are_those_of_the_network(zaya1_8b):
    """Per token they add up to the forward pass without attention's scores and the smallest ones."""
    result = {gemm.name: gemm for gemm in gemms(zaya1_8b, 1024)}
    tokens = 4 * 4096
    assert result["gate and up of all experts"].flops == 2 * tokens * 2048 * 4096
    assert result["queries"].flops == 2 * tokens * 2048 * 1024
    assert result["logits of a chunk"].columns == 262_272
    gram = result["Newton-Schulz, Gram"]
    assert (gram.rows, gram.depth, gram.columns, gram.count) == (2048, 2048, 2048, 1)


def test_a_plan_is_consistent(zaya1_8b):
    plan = make_plan(zaya1_8b, cluster(128))
    assert plan.parameters == PARAMETERS
    assert plan.micro_batch == 4
    assert plan.tokens == 16_777_216
    assert plan.bounds[plan.bound] == max(plan.bounds.values())
    assert plan.memory == memory_by_kind(for_platform(zaya1_8b, "rocm"), 1024)
    assert sum(plan.operations.forward.values()) * 3 == pytest.approx(plan.operations.training)
    flops = (plan.operations.training + plan.operations.recomputed) * 4 * 4096 + plan.operations.optimizer
    # Two layers of 256 x 256 and one of 256 x 17 in each of 40 routers, forward and backward.
    in_float32 = 3 * 2 * 40 * (2 * 256 * 256 + 256 * 17) * 4 * 4096
    seconds = (flops - in_float32) / 1307.4e12 + in_float32 / 163.4e12
    assert plan.seconds["matrix units"] == pytest.approx(seconds)


@pytest.mark.parametrize(("remat", "passes"), [("products", 3), ("attention_and_experts", 4), ("group", 5)])
def test_products_of_float32_operands_are_slower(zaya1_8b, remat, passes):
    def flops(**options):
        return float32_flops(with_execution(zaya1_8b, remat=remat, **options), 1024)

    assert flops() == pytest.approx(passes * 2 * 40 * (2 * 256 * 256 + 256 * 17) * 4 * 4096)
    newton_schulz = operations(zaya1_8b, 1024).optimizer
    assert flops(dtype="float32") == pytest.approx(
        step_flops(with_execution(zaya1_8b, remat=remat), 1024) - newton_schulz
    )
    optimizer = dataclasses.replace(zaya1_8b.optimizer, newton_schulz_dtype="float32")
    config = dataclasses.replace(zaya1_8b, optimizer=optimizer)
    assert float32_flops(config, 1024) - float32_flops(zaya1_8b, 1024) == pytest.approx(newton_schulz)


def test_more_gpus_need_less_time_each(zaya1_8b):
    one, many = (step_seconds(zaya1_8b, cluster(nodes)) for nodes in (1, 128))
    assert many["matrix units"] < one["matrix units"]
    assert memory_traffic(zaya1_8b, 1024) < memory_traffic(zaya1_8b, 8)


@pytest.mark.parametrize(("remat", "reads"), [("none", 2), ("products", 2), ("layer", 3), ("group", 4)])
def test_weights_are_read_once_more_each_time_that_layers_are_recomputed(zaya1_8b, remat, reads):
    def traffic(microbatches):
        execution = dataclasses.replace(zaya1_8b.execution, remat=remat, num_microbatches=microbatches)
        return memory_traffic(dataclasses.replace(zaya1_8b, execution=execution), 8)

    # One more microbatch reads its weights, and reads and writes its gradients.
    state = state_bytes(zaya1_8b, 8)
    assert traffic(4) - traffic(2) == 2 * (reads * state.weights + 2 * state.gradients)


def test_a_device_has_a_name():
    assert find_device("mi300x") is MI300X
    with pytest.raises(ValueError, match=r'unknown device "mi400x"; known are mi300x, mi325x'):
        find_device("mi400x")
