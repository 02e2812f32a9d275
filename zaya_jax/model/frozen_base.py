"""Frozen weights that a run with adapters stores once: in the type of products, or experts quantized.

A quantized matrix of the experts is two arrays, values and scales, at the path of the matrix. Training
dequantizes the experts of one layer at a time, within the scan, where they multiply ([QLoRA] section 3).

Letters: those of `zaya_jax.model.weights`; O outputs of a matrix, J rows of values, and G groups of inputs
that share a scale.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from pallas_kernels.product import QuantizedMatrix, dequantize, quantize
from zaya_jax.config import Config
from zaya_jax.config.sections.lora import QUANTIZED
from zaya_jax.errors import UserError
from zaya_jax.model.weight_declaration import Weight, flatten_weights

VALUES, SCALES = "values", "scales"
MX_BLOCK = 32
"""Inputs that share a scale in MXFP4."""
_GATE_UP = "gate_up_proj"


def declare_base(config: Config, declared: Mapping) -> dict[str, Any]:
    """Declares the frozen weights of a run with adapters.

    Operands of products have the type of `lora.base_dtype`; norms, scales and biases are float32.

    Raises:
      UserError: if the experts cannot be quantized.
    """
    base, compute = config.lora.base_dtype, config.execution.dtype
    is_quantized = base in QUANTIZED
    dtype = compute if base is None or is_quantized else base
    flat: dict[str, Weight] = {}
    for path, weight in flatten_weights(declared).items():
        if is_quantized and weight.of_experts:
            flat |= _declare_quantized(path, weight, str(base))
        else:
            own = dtype if weight.in_products else weight.dtype
            flat[path] = dataclasses.replace(weight, trains=False, dtype=own)
    return unflatten_dict(flat, sep="/")


def _declare_quantized(path: str, weight: Weight, base: str) -> dict[str, Weight]:
    assert weight.matrix is not None, "experts are matrices"
    counts, num_inputs, outputs = weight.shape[:2], weight.shape[2], weight.shape[3:]
    is_mx = base == "mxfp4"
    if is_mx and num_inputs % MX_BLOCK:
        raise UserError(
            f'lora.base_dtype is "mxfp4", and {path} has {num_inputs} inputs; they must be a multiple of '
            f'{MX_BLOCK}: use "int8"'
        )
    # Two E2M1 values per byte.
    rows = num_inputs // 2 if is_mx else num_inputs
    groups = num_inputs // MX_BLOCK if is_mx else 1
    # Neither is an operand of products, so that no cast changes the bits.
    array = functools.partial(Weight, trains=False)
    num_outputs = math.prod(outputs)
    return {
        f"{path}/{VALUES}": array("LEJO", (*counts, rows, num_outputs), dtype="uint8" if is_mx else "int8"),
        f"{path}/{SCALES}": array(
            "LEGO", (*counts, groups, num_outputs), dtype="uint8" if is_mx else "float32"
        ),
    }


def num_weights(path: str, weight: Weight) -> int:
    """Number of weights that an array stores: two per byte of pairs, and none in scales."""
    if path.endswith(f"/{SCALES}") and path.startswith("layers/experts/"):
        return 0
    return weight.size * (2 if weight.dtype == "uint8" else 1)


def stored(declared: Mapping[str, Weight], params: Mapping) -> dict[str, Any]:
    """Rounds and quantizes the weights of another run as a training state stores them.

    Args:
      declared: declarations of all weights of the run, by path.
      params: nested float32 weights, without adapters.
    """
    flat: dict[str, Any] = {}
    # A quantized matrix is the only one that is not declared under its name.
    for path, x in _by_path(params).items():
        if path in declared:
            flat[path] = x.astype(declared[path].dtype)
        else:
            matrix = quantize(_joined(path, x), declared[f"{path}/{VALUES}"].dtype)
            flat |= {f"{path}/{VALUES}": matrix.values, f"{path}/{SCALES}": matrix.scales}
    return unflatten_dict(flat, sep="/")


def with_quantized(params: Mapping) -> Mapping:
    """Joins the two arrays of each quantized matrix of the experts, for `zaya_jax.model.zaya`."""
    experts = params["layers"]["experts"]
    if not any(isinstance(x, Mapping) for x in experts.values()):
        return params
    joined = {name: QuantizedMatrix(x[VALUES], x[SCALES]) for name, x in experts.items()}
    return {**params, "layers": {**params["layers"], "experts": joined}}


def dequantized(layers: Mapping, dtype: DTypeLike) -> Mapping:
    """Computes quantized experts, of one layer or a stack of them; other weights are unchanged.

    Args:
      layers: nested weights of the layers, quantized matrices as a `QuantizedMatrix` or as two arrays.
      dtype: type of the computed weights.
    """
    experts = with_quantized({"layers": layers})["layers"]["experts"]
    dense = {
        name: _split(name, dequantize(x, dtype)) if isinstance(x, QuantizedMatrix) else x
        for name, x in experts.items()
    }
    return {**layers, "experts": dense}


def _joined(path: str, x: jax.Array) -> jax.Array:
    """A stack of matrices [L, E, inputs, outputs]; those of gate and up are one matrix."""
    return x.reshape(*x.shape[:3], -1) if path.endswith(_GATE_UP) else x


def _split(name: str, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], 2, -1) if name == _GATE_UP else x


def _by_path(tree: Mapping) -> dict[str, Any]:
    return cast(Any, flatten_dict(tree, sep="/"))
