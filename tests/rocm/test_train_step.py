"""The train step of a small ZAYA1, compiled for 1,024 MI300X or, by option, 8: communication and FLOPs."""

import collections
import dataclasses
import functools
import re

import pytest

from zaya_jax.config import Config
from zaya_jax.model.weights import count_parameters
from zaya_jax.plan.arithmetic import operations
from zaya_jax.plan.compiled.hlo import Program, in_scope
from zaya_jax.plan.compiled.traffic import ALLOCATION
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.memory import expert_bytes, partitioned_bytes, state_bytes
from zaya_jax.plan.output.plan import read_compilation, train_step_job
from zaya_jax.plan.rocm.compiler import compile_program
from zaya_jax.plan.shares import with_execution

NODES = (pytest.param(1, marks=pytest.mark.campaign), 128)  # the same checks as for 1,024


def small_zaya1(num_gpus):
    """A network with all parts, and 60 matrices, a number that neither 8 nor 1,024 divides."""
    return Config.from_dict(
        {
            "model": {
                "vocab_size": 1024,
                "hidden_size": 256,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "moe_intermediate_size": 256,
                "num_experts": 3,
                "router_hidden_size": 64,
                "max_position_embeddings": 64,
            },
            "data": {"sequence_length": 64, "batch_size": 2 * num_gpus},
            "optimizer": {"warmup_steps": 4, "newton_schulz_dtype": "bfloat16"},
            "train": {"num_steps": 30},
            "execution": {"remat": "layer", "gradient_dtype": "bfloat16", "loss_chunk": 64},
        }
    )


@functools.cache
def compiled(nodes):
    cluster = Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)
    return compile_program(train_step_job(small_zaya1(cluster.num_gpus), cluster))


@functools.cache
def report(nodes):
    return read_compilation(compiled(nodes), Cluster(device=MI300X, nodes=nodes, gpus_per_node=8))


@pytest.fixture(params=NODES, ids=lambda nodes: f"{nodes}x8")
def nodes(request):
    return request.param


def test_gradients_are_reduce_scattered_and_weights_all_gathered(nodes):
    config = small_zaya1(8 * nodes)
    collectives = Program(compiled(nodes).hlo).collectives
    assert {c.kind for c in collectives} == {"reduce-scatter", "all-gather", "all-reduce"}
    sent = {
        kind: sum(c.runs * c.num_bytes for c in collectives if c.kind == kind)
        for kind in ("reduce-scatter", "all-gather")
    }
    kept, summed = (partitioned_bytes(config, 8 * nodes, dtype) for dtype in ("bfloat16", "float32"))
    assert kept >= 2 * count_parameters(config.model)
    assert sent == {"reduce-scatter": summed, "all-gather": kept}


def test_bfloat16_gradients_are_summed_in_float32(nodes):
    """The communication library rounds sums at each hop to the dtype of the collective."""
    config = small_zaya1(8 * nodes)
    assert config.execution.gradient_dtype == "bfloat16"
    step = report(nodes)
    assert step.collectives["reduce-scatter"].dtypes == ("f32",)
    assert "bf16" in step.collectives["all-gather"].dtypes


def test_nothing_of_the_size_of_a_weight_is_all_reduced(nodes):
    """Only the loss, token counts and norms are: together less than a thousandth of the weights."""
    config = small_zaya1(8 * nodes)
    reduced = [c for c in Program(compiled(nodes).hlo).collectives if c.kind == "all-reduce"]
    assert reduced
    assert sum(c.runs * c.num_bytes for c in reduced) < 2 * count_parameters(config.model) / 1000


def test_a_gpu_orthogonalizes_only_its_own_matrices(nodes):
    """FLOPs of the compiled optimizer equal exactly those of the matrices assigned to a GPU."""
    config = small_zaya1(8 * nodes)
    expected = operations(config, 8 * nodes)
    assert Program(compiled(nodes).hlo).flops("optimizer") == expected.optimizer
    assert expected.optimizer < expected.optimizer_replicated / (6 if nodes == 1 else 20)


def test_flops_of_experts_and_head_equal_the_arithmetic(nodes):
    """Experts: forward and recomputed, by the vendor's product. Head: twice backward; the kernel of the loss
    computes the logits.
    """
    config = small_zaya1(8 * nodes)
    program, tokens = Program(compiled(nodes).hlo), 2 * 64
    forward = operations(config, 8 * nodes).forward
    assert program.flops("ragged_dot_general") == 2 * forward["experts"] * tokens
    assert program.flops("loss") == 2 * forward["head"] * tokens
    kernels = {kernel.name for kernel in compiled(nodes).kernels}
    assert {name for name in kernels if "cross_entropy" in name} == {"cross_entropy_probabilities"}


@functools.cache
def compiled_in_nodes():
    """As on 128 nodes, with 3 experts on the 8 GPUs of each: five GPUs store none."""
    cluster = Cluster(device=MI300X, nodes=128, gpus_per_node=8)
    return compile_program(
        train_step_job(with_execution(small_zaya1(cluster.num_gpus), node_devices=8), cluster)
    )


@pytest.mark.campaign
def test_messages_of_shared_experts_use_the_shortest_links():
    """Within the node, or between GPUs with equal numbers; only counts and norms are exchanged among all at
    once.
    """
    collectives = Program(compiled_in_nodes().hlo).collectives
    assert {c.kind for c in collectives} == {"all-gather", "all-reduce", "all-to-all"}
    experts = expert_bytes(with_execution(small_zaya1(1024), node_devices=8))
    # Forward and again for the backward pass, and their gradients.
    assert sent(collectives, "/experts/") == {"all-gather": 2 * experts, "all-to-all": experts}
    assert "f32" not in {
        dtype for c in collectives if c.kind == "all-to-all" and "/while/" in c.op_name for dtype in c.dtypes
    }


def test_shared_experts_of_other_nodes_are_received_once_per_layer():
    """Forward only, and gradients in the backward pass, an eighth each, as each GPU stores them."""
    in_layers = [c for c in Program(compiled_in_nodes().hlo).collectives if "/while/" in c.op_name]
    own = expert_bytes(with_execution(small_zaya1(1024), node_devices=8)) // 8
    assert sent(in_layers, "gather_weights") == {"all-gather": own, "all-to-all": own}


def test_transfers_in_a_node_and_between_nodes_have_a_stream_each():
    streams = collections.defaultdict(set)
    for instructions in Program(compiled_in_nodes().hlo).computations.values():
        for each in instructions:
            if each.opcode in ("all-gather-start", "all-to-all-start") and "/while/" in each.op_name:
                scope = "gather_weights" if in_scope(each.op_name, "gather_weights") else "experts"
                streams[scope].update(re.findall(r'_xla_stream_annotation="(\d+)"', each.attributes) or "?")
    assert streams == {"experts": {"0"}, "gather_weights": {"1"}}


def test_stacks_of_a_loop_over_layers_are_not_filled_with_zeros_first():
    """Each layer writes its part of the stacks that the backward pass reads."""
    program, num_layers = Program(compiled_in_nodes().hlo), 3
    stacks = [
        instruction
        for instruction in program.computations[program.entry]
        if not instruction.operands and instruction.opcode in ("fusion", "broadcast", "custom-call")
        for shape in instruction.shapes
        if shape.sizes[:1] == (num_layers,) and shape.num_bytes >= num_layers * 2 * 64 * 256
    ]
    assert stacks
    assert all(ALLOCATION in instruction.attributes for instruction in stacks)


def sent(collectives, scope):
    """Bytes of collectives in a scope, by kind."""
    result = collections.Counter()
    for each in collectives:
        if scope in each.op_name:
            result[each.kind] += each.runs * each.num_bytes
    return result


def test_a_gpu_stores_only_its_part_of_shared_experts():
    """Kept weights and gradients are smaller than on a GPU with all experts."""
    state = state_bytes(with_execution(small_zaya1(1024), node_devices=8), 1024)
    whole = state_bytes(small_zaya1(1024), 1024)
    assert state.weights + state.gradients < 0.75 * (whole.weights + whole.gradients)
    memory = compiled_in_nodes().memory
    assert memory.total < compiled(128).memory.total
    assert memory.arguments == pytest.approx(
        state.master + state.moments + 2 * 64 * 4 * 5, rel=0.02, abs=4096
    )


def test_the_step_uses_the_kernels_that_the_table_selects_for_rocm(nodes):
    """The program is compiled on a CPU, which has no kernels."""
    names = {kernel.name for kernel in compiled(nodes).kernels}
    assert any(name.startswith("flash_attention_grad_keys") for name in names)
    assert not any(name.startswith("grouped_swiglu") for name in names)
    # The gradients of the experts, but not their forward products.
    assert {"grouped_matmul_grad_rows", "grouped_matmul_grad_weights"} <= {
        name for name in names if name.startswith("grouped_matmul")
    }
    assert "grouped_matmul" not in names


def xf32_kernels(compilation):
    assert sum(kernel.matrix_instructions for kernel in compilation.kernels)
    return {k.name: k.xf32_instructions for k in compilation.kernels if k.xf32_instructions}


def test_float32_factors_of_the_bfloat16_step_are_not_rounded_to_xf32():
    """Those of the router, which is float32 in a bfloat16 run."""
    assert not xf32_kernels(compiled(128))


@pytest.mark.campaign
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_float32_factors_of_the_float32_step_are_not_rounded_to_xf32(implementation):
    """With Newton-Schulz in float32, as it is by default, and every other product."""
    small = dataclasses.asdict(small_zaya1(1))
    small["optimizer"]["newton_schulz_dtype"] = "float32"
    small["execution"] |= {"dtype": "float32", "implementation": implementation}
    config = Config.from_dict(small)
    cluster = Cluster(device=MI300X, nodes=1, gpus_per_node=1)
    assert not xf32_kernels(compile_program(train_step_job(config, cluster)))


def test_the_report_of_a_compiled_step(nodes):
    cluster = Cluster(device=MI300X, nodes=nodes, gpus_per_node=8)
    step = report(nodes)
    state = state_bytes(small_zaya1(cluster.num_gpus), cluster.num_gpus)
    batch = 2 * 64 * 4 * 5
    assert step.memory.arguments == pytest.approx(state.master + state.moments + batch, rel=0.02, abs=4096)
    assert step.memory.total >= state.weights + state.master
    assert step.num_kernels > 50
    assert step.buffers[0][0] >= step.buffers[-1][0] > 0
    assert all("LDS" not in problem for problems in step.problems.values() for problem in problems)
    assert dataclasses.asdict(step)
