"""Weights that train in a run: all, those that are not frozen, or low-rank adapters.

An adapter is two factors of a matrix W of the layers, and the model multiplies by `W + (alpha / rank) A B`
([LoRA] section 4.1). The sum is computed for one layer at a time, within the scan. Operations thus have plain
matrices, and training computes exactly what an export of the merged weights does.

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

from pallas_kernels.precision import einsum
from zaya_jax.config import Config, LoraConfig, ModelConfig
from zaya_jax.errors import UserError
from zaya_jax.model.weight_declaration import Declarer, LoraTarget, Weight, flatten_weights, map_weights
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
        return map_weights(_frozen, declared) | {ADAPTERS: _declare_adapters(config.lora, declared)}
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
    return replaced(declared, {path: _frozen(flat[path]) for path in frozen})


def _frozen(weight: Weight) -> Weight:
    return dataclasses.replace(weight, trains=False)


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
    target = LoraTarget(path, config.alpha / config.rank)
    # No `matrix`, so AdamW updates them, as is usual. They have weight decay like other operands of products.
    a, b = declarer.normal(a_axes), declarer.constant(b_axes, 0.0)
    return {name: dataclasses.replace(w, decay=True, adapts=target) for name, w in (("a", a), ("b", b))}


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
    weights = flatten_weights(declared).values()
    total, trained = (sum(w.size for w in weights if w.trains or every) for every in (True, False))
    return None if trained == total else f"{trained:,} of {total:,} ({trained / total:.2%})"


def scaled_adapters(declared: Mapping[str, Weight], params: Mapping) -> Mapping:
    """Multiplies factors B by alpha / rank, so that the update of a weight is the product A B.

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
    changed = changed_matrices(declared, params["layers"], adapters)
    return params | {"layers": replaced(params["layers"], changed)}


def changed_matrices(declared: Mapping[str, Weight], weights: Mapping, adapters: Mapping) -> dict[str, Any]:
    """Adapted matrices plus the products of their factors, by path, in the types of the weights.

    Args:
      declared: declarations of all weights, by path.
      weights: nested weights of the layers.
      adapters: nested, scaled adapters of the same layers.
    """
    flat, factors = _by_path(weights), _by_path(adapters)
    changed = {}
    for path in [path.removesuffix("/a") for path in factors if path.endswith("/a")]:
        change = _change(declared[LAYERS + path], factors[f"{path}/a"], factors[f"{path}/b"])
        # Only the sum is rounded: in bfloat16 a small update would be lost before the addition.
        changed[path] = (flat[path].astype(jnp.float32) + change).astype(flat[path].dtype)
    return changed


def changed_matrices_of_layer(config: ModelConfig, weights: Mapping, adapters: Mapping) -> dict[str, Any]:
    """`changed_matrices` for one layer, whose weights and adapters have no axis L."""
    # A stack of one layer makes it a batched product, which the remat policy "products" does not keep.
    stacks = jax.tree.map(lambda x: x[None], (weights, adapters))
    changed = changed_matrices(flatten_weights(declare(config)), *stacks)
    return {path: x[0] for path, x in changed.items()}


def replaced(tree: Mapping, values: Mapping[str, Any]) -> dict:
    """A copy of a nested tree with replaced values at some paths."""
    return unflatten_dict({**_by_path(tree), **values}, sep="/")


def _by_path(tree: Mapping) -> dict[str, Any]:
    return cast(Any, flatten_dict(tree, sep="/"))


def _change(weight: Weight, a: jax.Array, b: jax.Array) -> jax.Array:
    a_axes, b_axes = factor_axes(weight)
    # In full float32, not TF32, so that an export adds the same update.
    return einsum(f"{a_axes},{b_axes}->{weight.axes}", a, b)
