"""Loads a quantized folder for inference: experts stay quantized in memory, everything else is dense.

Letters: L layers, E experts, D inputs, F outputs, G groups of inputs that share a scale, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.embedding import QuantizedTable
from pallas_kernels.product import QuantizedMatrix
from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch.folder import PytorchWeights
from zaya_jax.convert.pytorch.huggingface import as_variables
from zaya_jax.convert.pytorch.layouts import OurWeight, WeightSlice, layer_slices, our_weights
from zaya_jax.convert.quantized.codecs import QuantizedValues
from zaya_jax.convert.quantized.export import EMBEDDING_PATH, EXPERT_MATRICES
from zaya_jax.convert.stream import Source, contiguous
from zaya_jax.errors import UserError
from zaya_jax.model.weights import declare, flatten_weights

_ALIGNMENT = 64
"""Bytes. On a CPU, JAX uses an array of the host without a copy if it begins at a multiple of this."""
_VALUES = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "mxfp4": np.dtype(np.uint8),
}


def load_quantized_variables(weights: PytorchWeights, dtype: Any) -> dict[str, Any]:
    """Loads all weights of a folder with quantized experts.

    Args:
      weights: the folder, open for reading.
      dtype: compute dtype, of the matrices that are not quantized; vectors are float32.

    Returns:
      Variables of `Zaya.apply`, with a `QuantizedMatrix` for each matrix of the experts, and a
      `QuantizedTable` for an embedding with 8 bits.

    Raises:
      UserError: if layers have different formats, which cannot be stacked.
    """
    config, dtypes = weights.config, _dtypes(weights.config, dtype)
    flat: dict[str, Any] = {}
    # Weight by weight, so that on an accelerator the host only has one of them.
    for path, weight in our_weights(config).items():
        slices = _slices(config, path, weight)
        # One quantized layer suffices: a stack that is partly dense is an error below.
        if path in EXPERT_MATRICES and any(map(weights.quantized, slices)):
            flat[path] = _load_experts(weights, path, slices, weight)
        elif path == EMBEDDING_PATH and _has_table(weights, slices):
            flat[path] = _load_table(weights, slices, weight)
        else:
            flat[path] = _load_dense(weights, slices, weight, dtypes[path])
    return as_variables(flat)


def load_dense_variables(source: Source, dtype: Any) -> dict[str, Any]:
    """Loads all weights of a source, matrices in the compute dtype and vectors in float32."""
    config, dtypes = source.config, _dtypes(source.config, dtype)
    return as_variables(
        {
            path: _load_dense(source, _slices(config, path, weight), weight, dtypes[path])
            for path, weight in our_weights(config).items()
        }
    )


def _dtypes(config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Types in memory by path, as `zaya_jax.inference.engine.decoder.cast_matrices` has them."""
    declared = flatten_weights(declare(config))
    return {
        path: dtype if path in declared and declared[path].std is not None else jnp.float32
        for path in our_weights(config)
    }


def _slices(config: ModelConfig, path: str, weight: OurWeight) -> list[WeightSlice]:
    num_layers = config.num_hidden_layers
    layers = range(num_layers) if weight.is_stacked else (None,)
    return [each for layer in layers for each in layer_slices(path, weight, num_layers, layer)]


def _load_experts(
    weights: PytorchWeights, path: str, slices: list[WeightSlice], weight: OurWeight
) -> QuantizedMatrix:
    # A stack has one type, and one number of groups.
    kinds = {_kind(weights, each) for each in slices}
    if len(kinds) > 1:
        listed = ", ".join(sorted(kinds))
        raise UserError(
            f"{path} is quantized differently in different layers ({listed}), which inference does not "
            "support; zaya "
            "convert makes a run of the folder, with dense weights"
        )
    # Axes are layers, experts, inputs, outputs.
    return _stacked(weights, slices, weight.shape[:2], weight.shape[2])


def _kind(weights: PytorchWeights, weight_slice: WeightSlice) -> str:
    tensor = weights.quantized(weight_slice)
    return "not at all" if tensor is None else str(tensor.scheme)


def _stacked(
    weights: PytorchWeights, slices: list[WeightSlice], counts: tuple[int, ...], num_inputs: int
) -> QuantizedMatrix:
    """Stacks the values and scales of all experts, with inputs before outputs."""
    arrays: list[np.ndarray] = []
    # Read one by one, so that the host never has a second copy of the stack.
    for number, weight_slice in enumerate(slices):
        parts = _transposed(weights, weight_slice)
        if not arrays:
            arrays = [_aligned((*counts, *part.shape), part.dtype) for part in parts]
        for array, part in zip(arrays, parts, strict=True):
            array[np.unravel_index(number, counts)] = part
    assert num_inputs % arrays[1].shape[-2] == 0, "groups have equal sizes"
    return QuantizedMatrix(*map(_on_device, arrays))


def _transposed(weights: PytorchWeights, weight_slice: WeightSlice) -> tuple[np.ndarray, np.ndarray]:
    quantized, tensor = weights.read_quantized(weight_slice), weights.quantized(weight_slice)
    assert tensor is not None, "checked before"
    # Bits stay as they are; only the name of their type changes.
    values = quantized.values.view(_VALUES[tensor.scheme.codec.name])
    # Inputs come first, as in all our matrices: a product reads rows of outputs.
    return contiguous(values.T), np.ascontiguousarray(quantized.scales.T)


def _has_table(weights: PytorchWeights, slices: list[WeightSlice]) -> bool:
    tensor = weights.quantized(slices[0])
    # Other formats are dequantized: a lookup of blocks would read parts of bytes.
    return tensor is not None and tensor.scheme.strategy in ("tensor", "channel")


def _load_table(weights: PytorchWeights, slices: list[WeightSlice], weight: OurWeight) -> QuantizedTable:
    tensor = weights.quantized(slices[0])
    assert tensor is not None, "checked before"
    values_VD = _aligned(weight.shape, _VALUES[tensor.scheme.codec.name])
    # A scale per tensor is repeated, which costs four bytes per token.
    scales_V1 = _aligned((weight.shape[0], 1), np.dtype(np.float32))
    for weight_slice in slices:
        part: QuantizedValues = weights.read_quantized(weight_slice)
        values_VD[weight_slice.index] = part.values.view(values_VD.dtype)
        scales_V1[weight_slice.index] = part.scales
    return QuantizedTable(_on_device(values_VD), _on_device(scales_V1))


def _load_dense(weights: Source, slices: list[WeightSlice], weight: OurWeight, dtype: Any) -> jax.Array:
    # Rounded slice by slice: float32 weights of the whole model are never in memory.
    array = _aligned(weight.shape, np.dtype(dtype))
    for weight_slice in slices:
        array[weight_slice.index] = contiguous(weights.read(weight_slice)).astype(array.dtype)
    return _on_device(array)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of the host that JAX need not copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    # NumPy aligns to 16 bytes only, so that the start is moved.
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _on_device(array: np.ndarray) -> jax.Array:
    # Nothing writes to the array afterwards, so that it may be the memory of the result.
    return jax.device_put(array, jax.local_devices()[0], may_alias=True)


def device_bytes(variables: Mapping[str, Any]) -> int:
    """Bytes of all device arrays of variables."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
