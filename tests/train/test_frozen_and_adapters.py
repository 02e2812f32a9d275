"""Frozen weights and low-rank adapters: what a step computes and changes."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from small_models import EXECUTION, SMALL

from zaya_jax.config import Config, DataConfig, LoraConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import make_example
from zaya_jax.model.adapters import declare_run, describe_trained, scaled_adapters
from zaya_jax.model.weights import declare, flatten_weights
from zaya_jax.model.zaya import Zaya, hidden_states
from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.plan.memory import state_bytes
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import init_state, make_setup

ROWS, TIME = 4, 16
FULL = Config(
    model=SMALL,
    data=DataConfig(sequence_length=TIME, batch_size=ROWS),
    # No clipping, and a constant learning rate.
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0, clip_norm=1e9),
    train=TrainConfig(num_steps=100),
    # Several chunks, over which a gradient of the table would be summed.
    execution=dataclasses.replace(EXECUTION, loss_chunk=16, remat="products"),
)
FROZEN_PATTERNS = ("embedding/*", "layers/router/*", "layers/experts/gate_up_proj", "*norm/scale")
FROZEN = dataclasses.replace(FULL, optimizer=dataclasses.replace(FULL.optimizer, frozen=FROZEN_PATTERNS))
LORA = dataclasses.replace(FULL, lora=LoraConfig(rank=4, alpha=8.0))
EVERYWHERE = dataclasses.replace(FULL, lora=LoraConfig(rank=2, alpha=8.0, targets=("layers/*",)))
EINSUMS = {
    "attention/q_proj": "ldz,lznh->ldnh",
    "attention/k_proj": "ldz,lzkh->ldkh",
    "attention/v_proj_current": "ldz,lzu->ldu",
    "attention/v_proj_delayed": "ldz,lzu->ldu",
    "attention/o_proj": "lnhz,lzd->lnhd",
    "router/down_proj/kernel": "ldz,lzr->ldr",
    "router/fc1/kernel": "lrz,lzs->lrs",
    "router/fc2/kernel": "lrz,lzs->lrs",
    "router/out_proj": "lrz,lzx->lrx",
    "experts/gate_up_proj": "leqdz,leqzf->ledqf",
    "experts/down_proj": "lefz,lezd->lefd",
}
"""The low-rank change of each matrix, written by hand."""


@functools.cache
def batch():
    tokens_BT = np.random.default_rng(0).integers(3, SMALL.vocab_size, (ROWS, TIME))
    return jax.tree.map(
        jnp.asarray, make_example(tokens_BT, delimiters=DocumentDelimiters(bos_id=1, eos_id=-1, pad_id=0))
    )


@functools.cache
def step(config):
    """Returns the compiled step."""
    mesh, setup = data_mesh(jax.devices()[:1]), make_setup(config)
    state = jax.eval_shape(functools.partial(init_state, config, setup))
    return compiled_step(state, setup=setup, mesh=mesh).lower(state, batch()).compile()


@functools.cache
def initial(config):
    return jax.jit(functools.partial(init_state, config, make_setup(config)))()


def start(config):
    """Returns a new state each time, because a step donates its state."""
    return jax.tree.map(jnp.copy, initial(config))


@functools.cache
def after_one_step(config):
    state, metrics = step(config)(start(config), batch())
    return state, jax.device_get(metrics)


def by_path(tree):
    return flatten_dict(tree, sep="/")


def is_frozen(path):
    gone = ("embedding/", "layers/router/", "layers/experts/gate_up_proj")
    return path.startswith(gone) or path.endswith("norm/scale")


@pytest.mark.campaign
def test_a_step_drops_the_updates_of_frozen_weights_and_no_other():
    (full, full_metrics), (state, metrics) = after_one_step(FULL), after_one_step(FROZEN)
    before, dropped = by_path(initial(FULL).params), 0
    for path, now in by_path(state.params).items():
        if is_frozen(path):
            dropped += 1
            np.testing.assert_array_equal(now, before[path])
        else:
            # The programs sum in different orders; an update is about the learning rate.
            np.testing.assert_allclose(now, by_path(full.params)[path], atol=1e-6, rtol=1e-6)
            assert np.abs(now - before[path]).max() > 1e-3
    assert dropped == sum(map(is_frozen, before)) > 12
    assert metrics.loss == pytest.approx(full_metrics.loss)
    np.testing.assert_array_equal(state.router_bias_LX, full.router_bias_LX)


def test_the_norm_is_that_of_trained_weights():
    _, full = after_one_step(FULL)
    _, metrics = after_one_step(FROZEN)
    assert metrics.gradient_norms["embedding"] == metrics.gradient_norms["router"] == 0
    assert metrics.gradient_norms["attention"] == pytest.approx(full.gradient_norms["attention"], rel=1e-5)
    total = math.sqrt(sum(float(norm) ** 2 for norm in metrics.gradient_norms.values()))
    assert metrics.gradient_norm == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("config", [FROZEN, LORA])
def test_frozen_weights_have_no_moments_and_no_gradient(config):
    state, declared = initial(config), flatten_weights(declare_run(config))
    trained = {path for path, weight in declared.items() if weight.trains}
    assert set(state.frozen) == declared.keys() - trained
    assert set(state.buckets) == trained
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    matrices = sum(w.size for w in declared.values() if w.trains and w.matrix)
    total = sum(w.size for w in declared.values() if w.trains)
    # Muon has one moment, AdamW has two.
    assert sum(x.size for x in moments) == matrices + 2 * (total - matrices)
    sizes = state_bytes(config, 1)
    assert sizes.gradients == 4 * total
    assert sizes.master == 4 * total
    assert sizes.frozen == 4 * sum(w.size for w in declared.values() if not w.trains)


def test_no_gradient_of_a_frozen_matrix_is_computed():
    """In the compiled program, a gradient of a matrix would be a product of the matrix's shape."""

    def made(config, shape):
        return re.findall(
            rf"= f32\[{shape}\]\S* (?:dot|fusion|scatter|add|call|custom-call)\(", step(config).as_text()
        )

    sizes = {"table": "61,32", "down_proj": "4,24,32", "gate_up_proj": "4,32,48"}
    for name, shape in sizes.items():
        assert made(FULL, shape), name
        assert not made(LORA, shape), name


@functools.cache
def random_adapters(config):
    """Returns weights with effective adapters: B is zero only at first."""
    params = initial(config).params
    shapes, random = params["adapters"], np.random.default_rng(1)
    drawn = jax.tree.map(lambda x: jnp.asarray(0.1 * random.standard_normal(x.shape), jnp.float32), shapes)
    return params | {"adapters": drawn}


def merged_by_hand(params, scale):
    """Returns each matrix plus its change, by the einsum above."""
    flat, factors = by_path(params["layers"]), by_path(params["adapters"])
    layers = {}
    for path, x in flat.items():
        change = 0.0
        if f"{path}/a" in factors:
            change = scale * jnp.einsum(
                EINSUMS[path], factors[f"{path}/a"], factors[f"{path}/b"], precision="highest"
            )
        layers[path] = x + change
    return {"embedding": params["embedding"], "final_norm": params["final_norm"]} | {
        "layers": _nested(layers)
    }


def _nested(flat):
    tree = {}
    for path, x in flat.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = x
    return tree


@pytest.mark.slow
def test_gradients_of_adapters_are_those_of_the_merged_network():
    config, params = EVERYWHERE, random_adapters(EVERYWHERE)
    bias_LX, tokens_BT = initial(config).router_bias_LX, batch().tokens_BT
    declared = flatten_weights(declare_run(config))
    pull = jax.random.normal(jax.random.key(0), (ROWS, TIME, SMALL.hidden_size))

    def ours(adapters):
        scaled = scaled_adapters(declared, params | {"adapters": adapters})
        return jnp.vdot(pull, hidden_states(SMALL, EXECUTION, scaled, bias_LX, tokens_BT).x_BTD)

    def reference(adapters):
        merged = merged_by_hand(params | {"adapters": adapters}, scale=8.0 / 2)
        return jnp.vdot(pull, hidden_states(SMALL, EXECUTION, merged, bias_LX, tokens_BT).x_BTD)

    (value, actual), (expected_value, expected) = (
        jax.jit(jax.value_and_grad(function))(params["adapters"]) for function in (ours, reference)
    )
    assert float(value) == pytest.approx(float(expected_value), rel=1e-4)
    assert by_path(actual).keys() == {f"{path}/{name}" for path in EINSUMS for name in "ab"}
    for path, gradient in by_path(actual).items():
        error = np.linalg.norm(gradient - by_path(expected)[path])
        assert 0 < error + 1e-9 < 1e-4 * np.linalg.norm(by_path(expected)[path]), path


@pytest.mark.parametrize(("remat", "is_kept"), [("products", False), ("layer", False), ("none", True)])
def test_matrices_with_their_changes_exist_one_layer_at_a_time(remat, is_kept):
    """Saved values of the backward pass have no axis of layers, unless nothing is recomputed."""
    config, params = LORA, random_adapters(LORA)
    execution = dataclasses.replace(EXECUTION, remat=remat)
    bias_LX, tokens_BT = initial(config).router_bias_LX, batch().tokens_BT

    def pull_back(adapters):
        scaled = params | {"adapters": adapters}

        def stream(scaled):
            return hidden_states(SMALL, execution, params | scaled, bias_LX, tokens_BT).x_BTD

        return jax.vjp(stream, {"adapters": scaled["adapters"]})[1]

    kept = jax.tree.leaves(jax.eval_shape(pull_back, params["adapters"]))
    # Queries, keys and values side by side, [L, D, C + 2 U], are made only of matrices with their changes.
    assert any(x.shape == (2, 32, 64) for x in kept) == is_kept


@functools.cache
def overfitted():
    state, losses = start(LORA), []
    for _ in range(120):
        state, metrics = step(LORA)(state, batch())
        losses.append(float(metrics.loss))
    return state, losses


def test_adapters_alone_memorize_a_batch():
    state, losses = overfitted()
    assert losses[0] > 4
    assert losses[-1] < 0.3
    assert state.skipped_steps == 0
    jax.tree.map(np.testing.assert_array_equal, state.frozen, initial(LORA).frozen)


def test_variables_have_adapters_merged():
    """Samples and evaluations of other libraries use the trained weights."""
    state, losses = overfitted()
    logits_BTV = Zaya(SMALL, EXECUTION).apply(
        state.variables, batch().tokens_BT, batch().positions_BT, batch().segments_BT
    ).logits_BTV  # fmt: skip
    log_probs_BTV = jax.nn.log_softmax(logits_BTV)
    picked_BT = jnp.take_along_axis(log_probs_BTV, batch().targets_BT[:, :, None], axis=-1)[:, :, 0]
    loss = -jnp.sum(picked_BT * batch().weights_BT) / jnp.sum(batch().weights_BT)
    assert float(loss) == pytest.approx(losses[-1], abs=0.05)
    assert "adapters" not in state.variables["params"]


def test_the_network_is_unchanged_at_first():
    """Its weights equal those of a run without adapters, bit for bit, and every change is zero."""
    flat, full = by_path(initial(LORA).params), by_path(initial(FULL).params)
    for path, x in full.items():
        np.testing.assert_array_equal(flat[path], x)
    assert all(not x.any() for path, x in flat.items() if path.endswith("/b"))
    assert all(x.std() > 0.05 for path, x in flat.items() if path.endswith("/a"))
    assert after_one_step(LORA)[1].loss == pytest.approx(after_one_step(FULL)[1].loss, rel=1e-5)


def test_under_two_hundredths_of_zaya1_8b_train():
    """Rank 8 for attention's projections and the router's matrices: 8 * (inputs + outputs) each."""
    options = ["lora.rank=8", "optimizer.name=adamw", "execution.node_devices=1"]
    config = load_config("configs/zaya1_8b.py", [f"--config.{option}" for option in options])
    model = config.model
    width, router = model.hidden_size, model.router_hidden_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    sides = [(width, queries), (width, keys), (width, keys // 2), (width, keys // 2), (queries, width)]
    sides += [(width, router), (router, router), (router, router), (router, model.num_experts + 1)]
    expected = 8 * model.num_hidden_layers * sum(map(sum, sides))
    declared = declare_run(config)
    weights = flatten_weights(declared).values()
    trained, total = sum(w.size for w in weights if w.trains), sum(w.size for w in weights)
    assert trained == expected
    assert trained / total < 0.02
    assert describe_trained(declared) == f"{trained:,} of {total:,} ({trained / total:.2%})"
    assert describe_trained(declare(model)) is None
    # Frozen weights exist once, in bfloat16: 17.7 GB of one GPU, which the step reads without a copy.
    sizes = state_bytes(config, 1)
    base = flatten_weights(declare(model)).values()
    assert sizes.frozen == sum(w.size * (2 if w.in_products else 4) for w in base)
    assert sizes.frozen / 2**30 < 16.5
    assert sizes.weights == 4 * trained
    assert sizes.moments + sizes.gradients + sizes.master < 0.01 * sizes.frozen


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"optimizer.frozen": ("embeding/*",)}, 'optimizer.frozen has "embeding/*", which no weight matches; '
         "did you mean embedding/bias, embedding/table, embedding/scale"),
        ({"optimizer.frozen": ("xyz",)}, "zaya train --dry-run lists all"),
        ({"optimizer.frozen": ("*",)}, "which freezes every weight; at least one must train"),
        ({"lora.rank": 2, "lora.targets": ("layers/moe_norm/*",)}, "which no matrix of the layers matches"),
        ({"lora.rank": 2, "lora.targets": ("embedding/*",)}, "which no matrix of the layers matches"),
        ({"lora.rank": 2, "lora.targets": ()}, "lora.targets is empty"),
        ({"lora.rank": -1}, "lora.rank is -1; it must be 0"),
        ({"lora.rank": 2, "lora.alpha": 0.0}, "lora.alpha is 0.0; it must be above 0"),
        ({"lora.rank": 2, "optimizer.frozen": ("embedding/*",)}, "set optimizer.frozen to ()"),
        ({"lora.rank": 2, "optimizer.hyperball": True}, "lora.rank is 2 and optimizer.hyperball True; AdamW"),
        ({"optimizer.name": "adamw", "optimizer.normuon": True},
         'optimizer.normuon is True and optimizer.name "adamw"'),
    ],
)  # fmt: skip
def test_mistakes_of_adapter_configs_are_user_errors(fields, sentence):
    options = [f"--config.{name}={value}" for name, value in fields.items()]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        declare_run(load_config("configs/tiny.py", options))


def test_frozen_operands_of_products_have_the_compute_dtype_and_the_rest_float32():
    execution = dataclasses.replace(EXECUTION, dtype="bfloat16")
    state = jax.eval_shape(lambda: initial_of(dataclasses.replace(LORA, execution=execution)))
    narrow = {path for path, x in state.frozen.items() if x.dtype == jnp.bfloat16}
    assert {"embedding/table", "layers/experts/down_proj", "layers/router/out_proj"} <= narrow
    wide = set(state.frozen) - narrow
    assert all(state.frozen[path].dtype == jnp.float32 for path in wide)
    kinds = ("scale", "bias", "temperature", "eda_scale")
    assert wide == {path for path in state.frozen if path.endswith(kinds)}
    assert all(x.dtype == jnp.float32 for x in (*state.buckets.values(), state.router_bias_LX))


def initial_of(config):
    return init_state(config, make_setup(config))


@pytest.mark.campaign
def test_a_step_computes_the_same_with_frozen_weights_of_either_type():
    """Products use bfloat16 in both cases, so that only the stored weights differ."""
    execution = dataclasses.replace(EXECUTION, dtype="bfloat16", remat="layer")
    config = dataclasses.replace(LORA, execution=execution)
    wide = dataclasses.replace(config, lora=dataclasses.replace(LORA.lora, base_dtype="float32"))
    (narrow, metrics), (state, expected) = after_one_step(config), after_one_step(wide)
    jax.tree.map(np.testing.assert_array_equal, narrow.buckets, state.buckets)
    assert metrics.loss == expected.loss
    assert state.frozen["embedding/table"].dtype == jnp.float32


def test_factors_b_and_norms_have_their_own_learning_rate():
    """The first update of AdamW is the sign of the gradient, plus weight decay."""
    lora = LoraConfig(rank=2, dora=True, b_learning_rate_ratio=4.0, targets=("layers/attention/q_proj",))
    setup = make_setup(dataclasses.replace(LORA, lora=lora))
    buckets = {each.name: jnp.full(each.shape, 0.5) for each in setup.partition.buckets}
    gradients = jax.tree.map(lambda x: -2.0 * jnp.ones_like(x), buckets)
    updates, _ = setup.optimizer.update(gradients, setup.optimizer.init(buckets), buckets, step=0)
    rate, decay = FULL.optimizer.learning_rate, FULL.optimizer.weight_decay
    prefix = "adapters/attention/q_proj"
    expected = {
        f"{prefix}/a": rate * (1 - 0.5 * decay),
        f"{prefix}/b": 4 * rate * (1 - 0.5 * decay),
        f"{prefix}/magnitude": 4 * rate,
    }
    assert updates.keys() == expected.keys()
    for name, x in updates.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5)
    with pytest.raises(ValueError, match="a custom optimizer has its own learning rates"):
        make_setup(dataclasses.replace(LORA, lora=lora), optimizer=lambda _: setup.optimizer)
