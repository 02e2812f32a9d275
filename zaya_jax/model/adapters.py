"""Which weights of a run train: all, those that are not frozen, or low-rank adapters in their place.

An adapter is two factors beside a matrix W of the layers, and the network multiplies with
`W + (alpha / rank) A B` ([LoRA] section 4.1). The sum is made of one layer at a time, within the scan,
so that every operation has a plain matrix, and training sees what an export of the sums will be.

Letters: those of `zaya_jax.model.weights`, and Z the rank. A factor has all axes that count matrices:
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

from zaya_jax.config import Config, LoraConfig, ModelConfig
from zaya_jax.model.weight import Change, Declarer, Weight, flatten_weights, map_weights
from zaya_jax.model.weights import declare

ADAPTERS = "adapters"
"""Where they lie among the weights: "adapters/attention/q_proj/a" is of "layers/attention/q_proj"."""
LAYERS = "layers/"
RANK = "Z"


def declare_run(config: Config) -> dict[str, Any]:
    """All weights of a run: the network's, its adapters if there are any, and which of them train.

    Raises:
      ValueError: for a pattern of weights that matches none, or if nothing is left to train.
    """
    declared = declare(config.model)
    if config.lora.rank:
        return map_weights(_frozen, declared) | {ADAPTERS: _declare_adapters(config.lora, declared)}
    paths = list(flatten_weights(declared))
    frozen = {
        path for pattern in config.optimizer.frozen for path in _matches(pattern, paths, "optimizer.frozen")
    }
    if len(frozen) == len(paths):
        raise ValueError(
            f"optimizer.frozen has {', '.join(config.optimizer.frozen)}, which is every weight; one at least "
            "must be left to train"
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
    """A normal and B zero: the network is at first what it was."""
    sizes = dict(zip(weight.axes, weight.shape, strict=True)) | {RANK: config.rank}
    inputs, _ = _sides(weight)
    # As wide as the uniform values that [PEFT] begins with.
    declarer = Declarer(sizes, std=(3 * math.prod(sizes[letter] for letter in inputs)) ** -0.5)
    a_axes, b_axes = factor_axes(weight)
    change = Change(path, config.alpha / config.rank)
    # No `matrix`: AdamW moves them, as is the custom. They decay as other factors of products do.
    a, b = declarer.normal(a_axes), declarer.constant(b_axes, 0.0)
    return {name: dataclasses.replace(w, decay=True, adapts=change) for name, w in (("a", a), ("b", b))}


def factor_axes(weight: Weight) -> tuple[str, str]:
    """The axes of both factors of a weight's change, A and B."""
    inputs, outputs = _sides(weight)
    counting = "".join(letter for letter in weight.axes if letter not in inputs + outputs)
    return counting + inputs + RANK, counting + RANK + outputs


def factor_paths(path: str) -> tuple[str, str]:
    """Where both factors of a weight's change lie, if it has an adapter."""
    adapter = f"{ADAPTERS}/{path.removeprefix(LAYERS)}"
    return f"{adapter}/a", f"{adapter}/b"


def _sides(weight: Weight) -> tuple[str, str]:
    assert weight.matrix is not None, "only matrices have adapters"
    return weight.matrix


def _matches(pattern: str, paths: Iterable[str], field: str) -> list[str]:
    found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not found:
        close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5)
        hint = f"close are {', '.join(close)}" if close else "zaya train --dry-run lists all"
        what = "matrix of the layers" if field == "lora.targets" else "weight"
        raise ValueError(f'{field} has "{pattern}", which no {what} matches; {hint}')
    return found


def describe_trained(declared: Mapping) -> str | None:
    """How many parameters train, and their share of all; None where all do."""
    weights = flatten_weights(declared).values()
    total, trained = (sum(w.size for w in weights if w.trains or every) for every in (True, False))
    return None if trained == total else f"{trained:,} of {total:,} ({trained / total:.2%})"


def scaled_adapters(declared: Mapping[str, Weight], params: Mapping) -> Mapping:
    """Weights whose adapters make up the whole change: B times alpha / rank.

    Args:
      declared: all weights of the run, by path.
      params: their values, nested; without adapters they are returned as they are.
    """
    if ADAPTERS not in params:
        return params
    flat = _by_path(params[ADAPTERS])
    scaled = {path: x * _scale(declared[f"{ADAPTERS}/{path}"], path) for path, x in flat.items()}
    return {**params, ADAPTERS: unflatten_dict(scaled, sep="/")}


def _scale(factor: Weight, path: str) -> float:
    assert factor.adapts is not None, "all that lies there adapts"
    return factor.adapts.scale if path.endswith("/b") else 1.0


def merged(declared: Mapping[str, Weight], params: Mapping) -> dict:
    """The network's weights with their adapters' changes, of all layers: what `Zaya.apply` takes.

    The arguments are those of `scaled_adapters`.
    """
    params = dict(scaled_adapters(declared, params))
    adapters = params.pop(ADAPTERS, None)
    if adapters is None:
        return params
    # Of all layers at once: for whoever uses the weights, not for a step, which would hold them twice.
    changed = changed_matrices(declared, params["layers"], adapters)
    return params | {"layers": replaced(params["layers"], changed)}


def changed_matrices(declared: Mapping[str, Weight], weights: Mapping, adapters: Mapping) -> dict[str, Any]:
    """The adapted matrices plus the products of their adapters' factors, by path, in the weights' types.

    Args:
      declared: all weights of the network, by path.
      weights: of the layers, nested.
      adapters: the same layers', scaled.
    """
    flat, factors = _by_path(weights), _by_path(adapters)
    changed = {}
    for path in [path.removesuffix("/a") for path in factors if path.endswith("/a")]:
        change = _change(declared[LAYERS + path], factors[f"{path}/a"], factors[f"{path}/b"])
        # One rounding, of the sum: in bfloat16 a small change would be lost before it is added.
        changed[path] = (flat[path].astype(jnp.float32) + change).astype(flat[path].dtype)
    return changed


def changed_matrices_of_layer(config: ModelConfig, weights: Mapping, adapters: Mapping) -> dict[str, Any]:
    """`changed_matrices` of one layer, whose weights and adapters have no axis L."""
    # As a stack of one layer: a product with a batch axis, which the remat policy "products" does not keep.
    stacks = jax.tree.map(lambda x: x[None], (weights, adapters))
    changed = changed_matrices(flatten_weights(declare(config)), *stacks)
    return {path: x[0] for path, x in changed.items()}


def replaced(tree: Mapping, values: Mapping[str, Any]) -> dict:
    """A nested tree with other values at some paths."""
    return unflatten_dict({**_by_path(tree), **values}, sep="/")


def _by_path(tree: Mapping) -> dict[str, Any]:
    return cast(Any, flatten_dict(tree, sep="/"))


def _change(weight: Weight, a: jax.Array, b: jax.Array) -> jax.Array:
    a_axes, b_axes = factor_axes(weight)
    # In full float32, not TF32: an export adds the same change.
    return jnp.einsum(f"{a_axes},{b_axes}->{weight.axes}", a, b, precision="highest")
