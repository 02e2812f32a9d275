"""Adapters on quantized experts: stored bytes, loss, gradients, checkpoints and exports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from small_models import EXECUTION, SMALL

from pallas_kernels.product import quantize
from zaya_jax.config import Config, DataConfig, LoraConfig, OptimizerConfig, TrainConfig
from zaya_jax.convert.quantized.codecs import CODECS
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import make_example
from zaya_jax.errors import UserError
from zaya_jax.model.adapters import declare_run, scaled_adapters
from zaya_jax.model.frozen_base import dequantized, num_weights, with_quantized
from zaya_jax.model.weights import flatten_weights, initialize
from zaya_jax.model.zaya import hidden_states, initial_router_bias
from zaya_jax.plan.memory import memory_by_kind, state_bytes
from zaya_jax.train.step.state import first_state, make_setup, with_variables

ROWS, TIME = 2, 16
MODEL = dataclasses.replace(SMALL, moe_intermediate_size=32)
FORMATS = {"int8": ("int8", np.float32), "mxfp4": ("uint8", np.uint8)}


def config_of(base, **fields):
    return Config(
        model=MODEL,
        data=DataConfig(sequence_length=TIME, batch_size=ROWS),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0),
        train=TrainConfig(num_steps=100, init_from="base"),
        execution=dataclasses.replace(EXECUTION, remat="layer"),
        lora=LoraConfig(rank=2, base_dtype=base, **fields),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_the_codecs(name):
    """With a block of zeros, tiny and huge weights, and every tie between two MXFP4 values."""
    numbers = np.random.default_rng(0)
    x_DF = (numbers.standard_normal((128, 40)) * np.exp(numbers.normal(0, 3, 40))).astype(np.float32)
    x_DF[:32, 0], x_DF[:, 1], x_DF[:, 2] = 0, 0, 1e-35
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -5, -0.0], np.float32)
    x_DF[:12, 3] = ties
    expected = CODECS[name].encode(np.ascontiguousarray(x_DF.T))
    actual = jax.jit(functools.partial(quantize, values_dtype=FORMATS[name][0]))(x_DF)
    np.testing.assert_array_equal(np.asarray(actual.values).T, expected.values)
    np.testing.assert_array_equal(np.asarray(actual.scales).T, expected.scales)


@functools.cache
def dense_params():
    return jax.jit(lambda: initialize(declare_run(config_of("float32")), jax.random.key(0)))()


@functools.cache
def state_of(base):
    """A state with the weights of another run."""
    config = config_of(base)
    setup = make_setup(config)
    params = {name: x for name, x in dense_params().items() if name != "adapters"}
    variables = {"params": params, "router_bias": {"layers": initial_router_bias(MODEL)}}

    def start():
        first = first_state(setup, initialize(declare_run(config), jax.random.key(1)), jax.random.key(2))
        return with_variables(first, variables)

    return jax.jit(start)()


@pytest.mark.parametrize("name", FORMATS)
def test_the_state_has_the_quantized_bytes_and_no_other_copy(name):
    frozen = state_of(name).frozen
    experts = {path: x for path, x in frozen.items() if path.startswith("layers/experts/")}
    dense = flatten_dict(dense_params()["layers"]["experts"], sep="/")
    for path, x in dense.items():
        values = experts.pop(f"layers/experts/{path}/values")
        experts.pop(f"layers/experts/{path}/scales")
        assert values.dtype == FORMATS[name][0]
        assert values.size == x.size // (1 if name == "int8" else 2)
    assert not experts
    declared = flatten_weights(declare_run(config_of(name)))
    sizes = sum(num_weights(path, w) for path, w in declared.items() if w.adapts is None)
    assert sizes == sum(
        x.size for x in jax.tree.leaves({k: v for k, v in dense_params().items() if k != "adapters"})
    )
    sized = state_bytes(config_of(name), 1)
    assert sized.frozen == sum(x.nbytes for x in frozen.values())
    # Next to them, the step has the dense experts of one layer at a time.
    layer = sum(x[0].nbytes for x in dense_params()["layers"]["experts"].values())
    assert memory_by_kind(config_of(name), 1)["dequantized experts of a layer"] == layer


@pytest.mark.parametrize(
    ("name", "targets"),
    [("int8", "layers/attention/*"), pytest.param("mxfp4", "layers/*", marks=pytest.mark.campaign)],
)
def test_loss_and_gradients_are_those_of_the_dequantized_model(name, targets):
    """The gradient of adapters passes through quantized experts of later layers."""
    config = config_of(name, targets=(targets,))
    declared, numbers = flatten_weights(declare_run(config)), np.random.default_rng(0)
    params = state_of(name).params
    adapters = jax.tree.map(
        lambda w: jnp.asarray(0.1 * numbers.standard_normal(w.shape), jnp.float32),
        declare_run(config)["adapters"],
    )
    tokens_BT = numbers.integers(3, MODEL.vocab_size, (ROWS, TIME))
    batch = make_example(tokens_BT, delimiters=DocumentDelimiters(bos_id=1, eos_id=-1, pad_id=0))
    pull = jax.random.normal(jax.random.key(0), (ROWS, TIME, MODEL.hidden_size))
    execution = dataclasses.replace(EXECUTION, remat="layer")

    def value(adapters, base):
        scaled = with_quantized(scaled_adapters(declared, base | {"adapters": adapters}))
        bias_LX = initial_router_bias(MODEL)
        hidden = hidden_states(MODEL, execution, scaled, bias_LX, jnp.asarray(batch.tokens_BT))
        return jnp.vdot(pull, hidden.x_BTD)

    dense = params | {"layers": dequantized(params["layers"], jnp.float32)}
    step = jax.jit(jax.value_and_grad(value))
    (ours, gradients), (expected, others) = step(adapters, params), step(adapters, dense)
    assert float(ours) == pytest.approx(float(expected), rel=1e-5)
    for actual, other in zip(*map(jax.tree.leaves, (gradients, others)), strict=True):
        assert np.linalg.norm(actual - other) < 1e-5 * np.linalg.norm(other)
        assert np.linalg.norm(other) > 0


def test_matrices_that_mxfp4_cannot_store_are_refused():
    config = dataclasses.replace(config_of("mxfp4"), model=SMALL)
    with pytest.raises(UserError, match="has 24 inputs; they must be a multiple of 32"):
        declare_run(config)
