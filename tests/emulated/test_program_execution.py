"""Whole programs, compiled for one MI300X and executed as XLA's dump lists their kernels, against the CPU.

The train step is a campaign: `pytest -n 0 -s -m campaign tests/emulated/test_program_execution.py` prints how
many kernels and instructions were executed, and the largest differences.
"""

import pathlib
import tempfile
import time

import jax
import numpy as np
import pytest
import quick_compilation
import small_programs
from library_calls import library_product
from program_execution import ProgramExecution, read_compiled_files

from zaya_jax.config import Config
from zaya_jax.data.reading.batch import Batch
from zaya_jax.errors import UserError
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.plan.compiled.hlo import Instruction, Shape
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.output.plan import train_step_job
from zaya_jax.plan.rocm.compiler import Job, compiler_output
from zaya_jax.plan.rocm.wheels import find_plugin
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import init_state, make_setup

CLUSTER = Cluster(device=MI300X, nodes=1, gpus_per_node=1)
SEED = 20261125


@pytest.fixture(autouse=True)
def _compiler(monkeypatch, tmp_path):
    pytest.importorskip("tinygrad")
    try:
        find_plugin()
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    # The code that a cluster runs, not the one that compiles quickly.
    for name in ("XLA_FLAGS", quick_compilation.FOLDER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def compiled(job):
    with compiler_output(job) as (_, folder):
        return read_compiled_files(folder)


def test_a_program_with_a_loop_a_branch_a_sort_and_atomics():
    files = compiled(Job(program="small_programs:lower", arguments={}, cluster=CLUSTER))
    rng = np.random.default_rng(SEED)
    weights, x, order = (rng.normal(size=shape.shape) for shape in small_programs.shapes())
    # Pairs of rows of one number are added to one row.
    order = rng.permutation(len(order))
    arguments = [weights.astype(np.float32), x.astype(np.float32), order.astype(np.int32)]
    execution = ProgramExecution(files)
    results = execution.run(arguments)
    assert execution.launches.total() > 10
    assert not execution.unwritten
    assert {thunk.kind for thunk in files.thunks} >= {"kWhile", "kConditional", "kCustomKernel"}
    assert execution.instructions["global_atomic_add_f32"]
    for result, expected in zip(results, jax.jit(small_programs.compute)(*arguments), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)


def tiny_zaya1(dtype):
    """Returns a network with all parts. Routing is decisive, so that rounding changes no expert."""
    return Config.from_dict(
        {
            "model": {
                "vocab_size": 128,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "moe_intermediate_size": 64,
                "num_experts": 3,
                "router_hidden_size": 32,
                "initializer_range": 0.3,
                "max_position_embeddings": 64,
            },
            "data": {"sequence_length": 64, "batch_size": 2},
            "optimizer": {"warmup_steps": 4, "newton_schulz_dtype": dtype},
            "train": {"num_steps": 30},
            "execution": {"remat": "layer", "gradient_dtype": dtype, "loss_chunk": 64, "dtype": dtype},
        }
    )


def random_batch(config):
    """Two rows of random tokens, the first of two documents."""
    rng, shape = np.random.default_rng(SEED), (config.data.batch_size, config.data.sequence_length)
    tokens = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy()
    segments, weights = np.ones(shape, np.int32), np.ones(shape, np.float32)
    segments[0, 40:], weights[0, 39] = 2, 0
    positions[0, 40:] -= 40
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, segments, None)


def as_numpy(tree):
    """All arrays of a tree by their names; keys of random numbers as their bits."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        named[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return named


GROUPS = {
    "loss": [".loss"],
    "gradient norms": [".gradient_norm"],
    "update norms": [".update_norm"],
    "AdamW's means": [".mu["],
    "AdamW's squares": [".nu["],
    "Muon's momenta": [".momentum["],
    "weights": [".buckets["],
}
"""Results of a step, by parts of their names. Moments of a first step are multiples of the gradient."""


def errors_of(results, expected):
    """Norm of the difference of each group of arrays, relative to the norm of the expected ones."""
    errors = {}
    for group, words in GROUPS.items():
        names = [name for name in expected if any(word in name for word in words)]
        assert names, group
        difference, whole = (
            np.sqrt(sum(np.sum(array.astype(np.float64) ** 2) for array in arrays))
            for arrays in ([results[name] - expected[name] for name in names], [expected[n] for n in names])
        )
        errors[group] = difference / whole
    return errors


def largest_of(results, expected):
    """The largest error of a single array, and its name."""
    norms = {name: np.linalg.norm(array.astype(np.float64)) for name, array in expected.items()}
    return max(
        (np.linalg.norm(results[name].astype(np.float64) - expected[name]) / (norms[name] or 1), name)
        for name in expected
    )


def step_on_cpu(config, batch):
    """Returns the results of a step by name, with updates instead of the weights."""
    setup = make_setup(config)
    state = init_state(config, setup)
    first = as_numpy((state, None))
    step = compiled_step(state, setup=setup, mesh=data_mesh(jax.devices()[:1]))
    return as_updates(as_numpy(step(state, batch)), first)


def as_updates(results, first):
    """Subtracts the weights before the step."""
    return {name: array - first[name] if ".buckets[" in name else array for name, array in results.items()}


def step_on_machine_code(config, batch):
    """Results of a step as `step_on_cpu` returns them; prints what was executed."""
    state = init_state(config, make_setup(config))
    arguments = as_numpy((state, batch))
    files = compiled(train_step_job(config, CLUSTER))
    execution, began = ProgramExecution(files), time.monotonic()
    results = execution.run(list(arguments.values()))
    seconds = time.monotonic() - began
    num_kernels = len(execution.launches), len(files.kernels)
    print(
        f"{config.execution.dtype}: {execution.launches.total()} launches of {num_kernels[0]} of "
        f"{num_kernels[1]} kernels, {execution.library_calls} library calls, "
        f"{execution.instructions.total()} instructions of {len(execution.instructions)} mnemonics, "
        f"{seconds:.0f} s"
    )
    # All but those of the branch that skips a step whose gradients are not finite.
    assert len(execution.launches) >= len(files.kernels) - 3
    assert not execution.unwritten
    setup = make_setup(config)
    like = jax.eval_shape(compiled_step(state, setup=setup, mesh=data_mesh(jax.devices()[:1])), state, batch)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
    return as_updates(dict(zip(names, results, strict=True)), as_numpy((state, None)))


def show(title, errors):
    print(f"  {title}: " + ", ".join(f"{group} {error:.1e}" for group, error in errors.items()))


@pytest.mark.campaign
def test_the_float32_train_step_on_machine_code():
    """Loss, gradient norms, moments and updates of weights equal those of the CPU, array by array."""
    config = tiny_zaya1("float32")
    batch = random_batch(config)
    results, expected = step_on_machine_code(config, batch), step_on_cpu(config, batch)
    errors, (error, name) = errors_of(results, expected), largest_of(results, expected)
    show("difference from the CPU", errors)
    print(f"  largest of one array: {error:.1e} ({name})")
    # The step rounds weights of up to 1 to float32, by 6e-8, and updates them by 1.5e-4.
    assert errors.pop("weights") < 4e-4
    assert max(errors.values()) < 1e-5
    # Nor is any single array wrong.
    assert error < 1e-3


@pytest.mark.campaign
def test_the_bfloat16_train_step_on_machine_code():
    """It is as near to the float32 step as the bfloat16 step of the CPU is."""
    config = tiny_zaya1("bfloat16")
    batch = random_batch(config)
    results, expected = step_on_machine_code(config, batch), step_on_cpu(config, batch)
    exact = step_on_cpu(tiny_zaya1("float32"), batch)
    errors, usual = errors_of(results, exact), errors_of(expected, exact)
    show("machine code and float32", errors)
    show("CPU and float32", usual)
    show("machine code and CPU", errors_of(results, expected))
    # Rounding differs, for instance in the order of sums. Norms are sums of squares, whose errors cancel
    # more on the one than on the other: for them two units of bfloat16 are the limit.
    limits = {group: max(2 * error, 2.0**-7) for group, error in usual.items()}
    assert {group: error for group, error in errors.items() if error > limits[group]} == {}


def grouped_call(**changes):
    axes = {
        "lhs_contracting_dimensions": "1",
        "rhs_contracting_dimensions": "1",
        "lhs_batch_dimensions": None,
    }
    axes |= {
        "rhs_batch_dimensions": None,
        "lhs_ragged_dimensions": "0",
        "rhs_group_dimensions": "0",
    } | changes
    lists = ",".join(
        f'"{key}":[{"" if value is None else chr(34) + value + chr(34)}]' for key, value in axes.items()
    )
    attributes = f'"__cublas$lt$groupedMatmul" "alpha_real":1,"beta":0,"epilogue":"DEFAULT",{lists}'
    return Instruction("call", "custom-call", (Shape("f32", (4, 2)),), (), "", attributes)


def test_a_grouped_product_of_the_library():
    rng = np.random.default_rng(SEED)
    rows, matrices = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(3, 3, 2)).astype(np.float32)
    result = library_product(grouped_call(), [rows, matrices, np.array([1, 0, 2])])
    np.testing.assert_allclose(result[0], rows[0] @ matrices[0], rtol=1e-6)
    np.testing.assert_allclose(result[1:3], rows[1:3] @ matrices[2], rtol=1e-6)
    assert np.isnan(result[3]).all()


def test_another_library_call_is_refused():
    with pytest.raises(ValueError, match="unknown library call call"):
        library_product(grouped_call(rhs_contracting_dimensions="2"), [])
