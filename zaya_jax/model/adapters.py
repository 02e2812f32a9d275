"""Weights that train in a run: all, those that are not frozen, or low-rank adapters.

An adapter is two factors of a matrix W of the layers, and the model multiplies by `W + (alpha / rank) A B`
([LoRA] section 4.1). With DoRA, the columns of that sum have norms that train as well ([DoRA] eq. 5). The
matrix is computed for one layer at a time, within the scan. Operations thus have plain matrices, and training
computes exactly what an export of the merged weights does.

Letters: those of `zaya_jax.model.weights`, and Z the rank. A factor has all axes that index matrices:
those of experts [L, E, F, D] are [L, E, F, Z] and [L, E, Z, D].
"""

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from pallas_kernels.precision import einsum
from zaya_jax.config import Config, LoraConfig, ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.model.frozen_base import declare_base, dequantized, num_weights
from zaya_jax.model.weight_declaration import Declarer, LoraTarget, Weight, flatten_weights
from zaya_jax.model.weights import declare

ADAPTERS = "adapters"
"""Key of the adapters: "adapters/attention/q_proj/a" is a factor of "layers/attention/q_proj"."""
LAYERS = "layers/"
RANK = "Z"


def declare_run(config: Config) -> dict[str, Any]:
    """Declares all weights of a run, adapters included, and which of them train.

    Raises:
      UserError: if a pattern matches no weight, or all weights are frozen.
    """
    declared = declare(config.model)
    if config.lora.rank:
        return declare_base(config, declared) | {ADAPTERS: _declare_adapters(config.lora, declared)}
    paths = list(flatten_weights(declared))
    frozen = {
        path for pattern in config.optimizer.frozen for path in _matches(pattern, paths, "optimizer.frozen")
    }
    if len(frozen) == len(paths):
        raise UserError(
            f"optimizer.frozen has {', '.join(config.optimizer.frozen)}, which freezes every weight; at "
            "least one must train"
        )
    flat = flatten_weights(declared)
    return replaced(declared, {path: dataclasses.replace(flat[path], trains=False) for path in frozen})


def _declare_adapters(config: LoraConfig, declared: Mapping) -> dict[str, Any]:
    weights = flatten_weights(declared)
    matrices = [path for path, weight in weights.items() if weight.matrix and path.startswith(LAYERS)]
    targets = {path for pattern in config.targets for path in _matches(pattern, matrices, "lora.targets")}
    factors = {
        f"{path.removeprefix(LAYERS)}/{name}": factor
        for path in matrices
        if path in targets
        for name, factor in _declare_factors(config, path, weights[path]).items()
    }
    return unflatten_dict(factors, sep="/")


def _declare_factors(config: LoraConfig, path: str, weight: Weight) -> dict[str, Weight]:
    """Declares A with normal and B with zero initial values, so that the model is unchanged at first."""
    sizes = dict(zip(weight.axes, weight.shape, strict=True)) | {RANK: config.rank}
    inputs, _ = _sides(weight)
    # The same variance as the uniform initial values of [PEFT].
    declarer = Declarer(sizes, std=(3 * math.prod(sizes[letter] for letter in inputs)) ** -0.5)
    a_axes, b_axes = factor_axes(weight)
    target, rate = LoraTarget(path, config.scale, weight), config.b_learning_rate_ratio
    # No `matrix`, so AdamW updates them, as is usual. They have weight decay like other operands of products.
    a, b = declarer.normal(a_axes), declarer.constant(b_axes, 0.0)
    parts = {"a": dataclasses.replace(a, decay=True), "b": dataclasses.replace(b, decay=True, rate=rate)}
    if config.dora:
        # Its initial value is that of the weights, which are not declared: `magnitudes`.
        norms = declarer.constant("".join(x for x in weight.axes if x not in inputs), 1.0)
        parts["magnitude"] = dataclasses.replace(norms, rate=rate)
    return {name: dataclasses.replace(part, adapts=target) for name, part in parts.items()}


def factor_axes(weight: Weight) -> tuple[str, str]:
    """Axes of the factors A and B of a weight's adapter."""
    inputs, outputs = _sides(weight)
    counting = "".join(letter for letter in weight.axes if letter not in inputs + outputs)
    return counting + inputs + RANK, counting + RANK + outputs


def factor_paths(path: str) -> tuple[str, str]:
    """Paths of the factors A and B of a weight's adapter, if it has one."""
    adapter = f"{ADAPTERS}/{path.removeprefix(LAYERS)}"
    return f"{adapter}/a", f"{adapter}/b"


def _sides(weight: Weight) -> tuple[str, str]:
    assert weight.matrix is not None, "only matrices have adapters"
    return weight.matrix


def _matches(pattern: str, paths: Iterable[str], field: str) -> list[str]:
    matches = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not matches:
        close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "zaya train --dry-run lists all weights"
        what = "matrix of the layers" if field == "lora.targets" else "weight"
        raise UserError(f'{field} has "{pattern}", which no {what} matches; {hint}')
    return matches


def describe_trained(declared: Mapping) -> str | None:
    """Number and fraction of parameters that train, as text; None if all do."""
    weights = flatten_weights(declared)
    trained = sum(w.size for w in weights.values() if w.trains)
    total = sum(num_weights(path, weight) for path, weight in weights.items())
    return None if trained == total else f"{trained:,} of {total:,} ({trained / total:.2%})"


def scaled_adapters(declared: Mapping[str, Weight], params: Mapping) -> Mapping:
    """Multiplies factors B by their scale, so that the update of a weight is the product A B.

    Args:
      declared: declarations of all weights of the run, by path.
      params: nested weights; returned unchanged if there are no adapters.
    """
    if ADAPTERS not in params:
        return params
    flat = _by_path(params[ADAPTERS])
    scaled = {path: x * _scale(declared[f"{ADAPTERS}/{path}"], path) for path, x in flat.items()}
    return {**params, ADAPTERS: unflatten_dict(scaled, sep="/")}


def _scale(factor: Weight, path: str) -> float:
    assert factor.adapts is not None, "all weights under this key are factors"
    return factor.adapts.scale if path.endswith("/b") else 1.0


def merged(declared: Mapping[str, Weight], params: Mapping) -> dict:
    """Merges the adapters of all layers into the weights, for `Zaya.apply`.

    Args:
      declared: declarations of all weights of the run, by path.
      params: nested weights, with or without adapters.
    """
    params = dict(scaled_adapters(declared, params))
    adapters = params.pop(ADAPTERS, None)
    if adapters is None:
        return params
    # All layers at once: for inference, not for a training step, which would store the weights twice.
    layers = dequantized(params["layers"], jnp.float32)
    targets = {w.adapts.path: w.adapts.weight for w in declared.values() if w.adapts is not None}
    return params | {"layers": replaced(layers, changed_matrices(targets, layers, adapters))}


def magnitudes(declared: Mapping[str, Weight], params: Mapping) -> dict[str, Any]:
    """DoRA's initial norms, those of the matrices, so that the model is unchanged at first.

    Args:
      declared: declarations of all weights of the run, by path.
      params: nested weights as the training state stores them.

    Returns:
      Norms by path, empty without DoRA.
    """
    # By the weights as they are stored: a rounded matrix has slightly other norms.
    norms = {path: w.adapts for path, w in declared.items() if path.endswith("/magnitude") and w.adapts}
    flat = _by_path(dequantized(params["layers"], jnp.float32)) if norms else {}
    return {
        path: _column_norms(target.weight, flat[target.path.removeprefix(LAYERS)].astype(jnp.float32))
        for path, target in norms.items()
    }


def changed_matrices(declared: Mapping[str, Weight], weights: Mapping, adapters: Mapping) -> dict[str, Any]:
    """Adapted matrices plus the products of their factors, by path, float32.

    Args:
      declared: declarations of the adapted matrices, by path.
      weights: nested weights of the layers.
      adapters: nested, scaled adapters of the same layers.
    """
    flat, factors = _by_path(weights), _by_path(adapters)
    changed = {}
    for path in [path.removesuffix("/a") for path in factors if path.endswith("/a")]:
        weight = declared[LAYERS + path]
        change = _change(weight, factors[f"{path}/a"], factors[f"{path}/b"])
        matrix, magnitude = flat[path].astype(jnp.float32) + change, factors.get(f"{path}/magnitude")
        changed[path] = matrix if magnitude is None else _with_norms(weight, matrix, magnitude)
    return changed


def changed_matrices_of_layer(config: ModelConfig, weights: Mapping, adapters: Mapping) -> dict[str, Any]:
    """`changed_matrices` for one layer, whose weights and adapters have no axis L, in the weights' types."""
    stacks = jax.tree.map(lambda x: x[None], (weights, adapters))
    changed, flat = changed_matrices(flatten_weights(declare(config)), *stacks), _by_path(weights)
    # Only the sum is rounded: in bfloat16 a small update would be lost before the addition.
    return {path: x[0].astype(flat[path].dtype) for path, x in changed.items()}


def replaced(tree: Mapping, values: Mapping[str, Any]) -> dict:
    """A copy of a nested tree with replaced values at some paths."""
    return unflatten_dict({**_by_path(tree), **values}, sep="/")


def _by_path(tree: Mapping) -> dict[str, Any]:
    return cast(Any, flatten_dict(tree, sep="/"))


def _change(weight: Weight, a: jax.Array, b: jax.Array) -> jax.Array:
    a_axes, b_axes = factor_axes(weight)
    # In full float32, not TF32, so that an export adds the same update.
    return einsum(f"{a_axes},{b_axes}->{weight.axes}", a, b)


def _column_norms(weight: Weight, matrix: jax.Array) -> jax.Array:
    """Norms over the input axes of a matrix."""
    return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=_input_axes(weight)))


def _with_norms(weight: Weight, matrix: jax.Array, magnitude: jax.Array) -> jax.Array:
    """Scales the columns of a matrix to the trained norms ([DoRA] eq. 5)."""
    # Constant in the backward pass, which saves memory at no loss of accuracy ([DoRA] section 4.3).
    norms = lax.stop_gradient(_column_norms(weight, matrix))
    # A column of zeros stays zero, whatever its trained norm is.
    factors = magnitude / jnp.where(norms > 0, norms, 1.0)
    return matrix * jnp.expand_dims(factors, _input_axes(weight))


def _input_axes(weight: Weight) -> tuple[int, ...]:
    return tuple(map(weight.axes.index, _sides(weight)[0]))
