"""Adapters against PEFT's own layers: scales, DoRA's norms, and their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from small_models import EXECUTION, SMALL

from zaya_jax.config import Config, DataConfig, LoraConfig
from zaya_jax.model.adapters import changed_matrices, declare_run, magnitudes, merged, scaled_adapters
from zaya_jax.model.weights import flatten_weights, initialize

RANK, ALPHA = 3, 8.0
FORMS = [{}, {"rslora": True}, {"dora": True}, {"rslora": True, "dora": True}]
PATH = "attention/k_proj"


def config_of(**fields):
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=(f"layers/{PATH}",), **fields)
    return Config(model=SMALL, data=DataConfig(sequence_length=16), execution=EXECUTION, lora=lora)


def random_params(config):
    """Weights with effective adapters: B is not zero, and norms are not those of the matrices."""
    params, numbers = initialize(declare_run(config), jax.random.key(0)), np.random.default_rng(0)
    draw = {
        name: jnp.asarray(numbers.normal(1.0 if name == "magnitude" else 0.0, 0.3, x.shape), jnp.float32)
        for name, x in params["adapters"]["attention"]["k_proj"].items()
    }
    return params | {"adapters": {"attention": {"k_proj": draw}}}


def peft_layer(config, params, layer):
    """PEFT's layer with the weights of one of our layers; torch has outputs first."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    own = {name: np.asarray(x[layer]) for name, x in params["adapters"]["attention"]["k_proj"].items()}
    weight = np.asarray(params["layers"]["attention"]["k_proj"][layer]).reshape(SMALL.hidden_size, -1)
    linear = torch.nn.Linear(*weight.shape, bias=False)
    linear.weight.data = torch.tensor(weight.T)
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["0"],
        use_rslora=config.lora.rslora,
        use_dora=config.lora.dora,
    )
    model = peft.get_peft_model(torch.nn.Sequential(linear), settings)
    module = model.base_model.model[0]
    parts = {"a": module.lora_A.default.weight, "b": module.lora_B.default.weight}
    if config.lora.dora:
        parts["magnitude"] = module.lora_magnitude_vector.default.weight
    for name, part in parts.items():
        part.data = torch.tensor(as_in_torch(name, own[name]))
    return torch, model, parts


def as_in_torch(name, x):
    """A part of an adapter with outputs first, and heads and their channels as one axis."""
    return x.reshape(-1) if name == "magnitude" else x.reshape(len(x), -1).T


@pytest.mark.campaign  # PEFT takes longest to import
@pytest.mark.parametrize("fields", FORMS)
def test_products_and_gradients_are_those_of_peft(fields):
    config, layer = config_of(**fields), 1
    params, declared = random_params(config), flatten_weights(declare_run(config))
    x = np.random.default_rng(1).standard_normal((5, SMALL.hidden_size)).astype(np.float32)

    def ours(adapters):
        scaled = scaled_adapters(declared, params | {"adapters": adapters})
        changed = changed_matrices(declared, params["layers"], scaled["adapters"])[PATH][layer]
        return jnp.sum(jnp.sin(x @ changed.reshape(SMALL.hidden_size, -1)))

    value, gradients = jax.value_and_grad(ours)(params["adapters"])
    torch, model, parts = peft_layer(config, params, layer)
    expected = model(torch.tensor(x)).sin().sum()
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    for name, part in parts.items():
        actual = as_in_torch(name, np.asarray(gradients["attention"]["k_proj"][name][layer]))
        error = np.linalg.norm(actual - part.grad.numpy())
        assert error < 1e-5 * np.linalg.norm(part.grad.numpy()), name


@pytest.mark.parametrize(
    "targets", ["layers/experts/*", pytest.param("layers/attention/*", marks=pytest.mark.campaign)]
)
def test_norms_start_as_those_of_the_matrices(targets):
    """The norms of PEFT are those of outputs, one for each gate, each up and each head's channel."""
    config = dataclasses.replace(config_of(), lora=LoraConfig(rank=RANK, targets=(targets,), dora=True))
    declared, params = declare_run(config), initialize(declare_run(config), jax.random.key(0))
    flat = flatten_dict(params["layers"], sep="/")
    norms = magnitudes(flatten_weights(declared), params)
    letters = {"q_proj": "ldnh->lnh", "o_proj": "lnhd->ld", "gate_up_proj": "ledqf->leqf"}
    for path, norm in norms.items():
        name = path.removeprefix("adapters/").removesuffix("/magnitude")
        if (ours := letters.get(name.rpartition("/")[2])) is not None:
            squares = np.square(np.asarray(flat[name], np.float64))
            np.testing.assert_allclose(norm, np.sqrt(np.einsum(ours, squares)), rtol=1e-6)
    # With these norms and B = 0 the matrices are unchanged, to a rounding.
    adapters = flatten_dict(params["adapters"], sep="/")
    adapters |= {path.removeprefix("adapters/"): norm for path, norm in norms.items()}
    changed = changed_matrices(flatten_weights(declared), params["layers"], adapters)
    assert len(changed) == len(norms) > 1
    for path, x in changed.items():
        np.testing.assert_allclose(x, flat[path], rtol=1e-6)


def test_a_column_of_zeros_stays_zero_and_has_a_finite_gradient():
    config = config_of(dora=True)
    params = random_params(config)
    zeros = jax.tree.map(jnp.zeros_like, {"layers": params["layers"], "adapters": params["adapters"]})

    def total(adapters):
        weights = merged(flatten_weights(declare_run(config)), params | zeros | {"adapters": adapters})
        return jnp.sum(jnp.square(weights["layers"]["attention"]["k_proj"] + 1))

    value, gradients = jax.value_and_grad(total)(zeros["adapters"])
    assert float(value) == params["layers"]["attention"]["k_proj"].size
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))
