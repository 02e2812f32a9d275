"""The quantized tensors of a folder: which stored tensors have the values and the scales of a weight.

Releases name them differently. Zyphra's ([Zyphra-quantized]) and transformers' keep the experts of a layer in
one tensor, and llm-compressor, vLLM and SGLang have one tensor per expert and projection. The following names
are known, where MODULE is a weight's name in the layout without ".weight":

| values | scales | in |
|---|---|---|
| MODULE or MODULE.weight | MODULE.weight_scale | compressed-tensors, 8 bits |
| MODULE.weight_packed | MODULE.weight_scale | compressed-tensors, MXFP4 |
| MODULE or MODULE.weight | MODULE_scale_inv or MODULE.weight_scale_inv | transformers' "fp8" |
| MODULE_blocks | MODULE_scales | transformers' "mxfp4" |

MODULE is `mlp.experts.gate_up_proj` for a stack, and `mlp.experts.7.gate_proj` for one expert. In the legacy
layout, whose experts are separate, it is `zaya_block.experts.local_experts.7.linear_fc1`.
Scales are factors in all forms, `weight_scale_inv` too.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

import numpy as np

from zaya_jax.convert.pytorch.layouts import Tensor, WeightSlice
from zaya_jax.convert.pytorch.safetensors_file import DTYPES, StoredTensor
from zaya_jax.convert.quantized.codecs import QuantizedValues
from zaya_jax.convert.quantized.schemes import Scheme
from zaya_jax.convert.quantized.stored_matrix import (
    ReadBytes,
    StoredMatrix,
    check_matrix,
    joined,
    matching_scheme,
)
from zaya_jax.errors import UserError

VALUE_ENDINGS = ("", ".weight", ".weight_packed", "_packed", "_blocks")
SCALE_ENDINGS = (".weight_scale", "_scale", ".weight_scale_inv", "_scale_inv", "_scales")
IGNORED_ENDINGS = (".input_scale",)
"""Scales of activations, which are not quantized here."""
VALUE_DTYPES = {"F8_E4M3": "fp8", "I8": "int8", "U8": "mxfp4", "F4": "mxfp4"}
"""Formats by the type of the values."""
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PROJECTIONS = {"gate_up_proj": (("gate_proj", "up_proj"), ("gate_up_proj",)), "down_proj": (("down_proj",),)}
"""Projections of one expert that are joined, by the name of the stack."""


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of a layout whose weights are quantized.

    Attributes:
      tensor: the tensor.
      parts: for each matrix of the tensor, the stored matrices that are joined by outputs, each with its
        index in the stack that it is stored in.
      names: names of the stored tensors that it consists of.
    """

    tensor: Tensor
    parts: tuple[tuple[tuple[StoredMatrix, int], ...], ...]
    names: frozenset[str]

    @property
    def scheme(self) -> Scheme:
        """How the weights are quantized."""
        return self.parts[0][0][0].scheme

    def read(self, read_bytes: ReadBytes, weight_slice: WeightSlice) -> QuantizedValues:
        """Reads the values and scales of a slice, in the order of the layout's axes."""
        # A slice is a matrix of a stack, or some rows of the only matrix.
        if len(self.parts) > 1:
            number = self.tensor.slices.index(weight_slice)
            start, stop = 0, self.tensor.shape[-2]
        else:
            number = 0
            sizes = [each.size // self.tensor.shape[-1] for each in self.tensor.slices]
            start = sum(sizes[: self.tensor.slices.index(weight_slice)])
            stop = start + weight_slice.size // self.tensor.shape[-1]
        return joined(list(_read_rows(read_bytes, self.parts[number], start, stop)))

    def decode(self, read_bytes: ReadBytes, weight_slice: WeightSlice) -> np.ndarray:
        """Reads the weights of a slice: values times scales, float32, with axes in our order."""
        weights_RC = self.scheme.codec.decode(self.read(read_bytes, weight_slice))
        return self.tensor.layout.to_ours(weights_RC, weight_slice.shape)


def _read_rows(
    read_bytes: ReadBytes, parts: tuple[tuple[StoredMatrix, int], ...], start: int, stop: int
) -> Iterator[QuantizedValues]:
    """Yields the given rows of parts that follow each other."""
    # Rows are numbered through all parts: those of gate, then those of up.
    first = 0
    for matrix, index in parts:
        last = first + matrix.shape[1]
        if start < last and first < stop:
            yield matrix.read(read_bytes, index, slice(max(start, first) - first, min(stop, last) - first))
        first = last


def find_quantized(
    tensors: list[Tensor], stored: Mapping[str, StoredTensor], schemes: tuple[Scheme, ...]
) -> dict[str, QuantizedTensor]:
    """Finds the quantized tensors of a folder.

    Args:
      tensors: all tensors of the layout.
      stored: position of each stored tensor, by name.
      schemes: schemes of config.json.

    Returns:
      The quantized tensors, by their name in the layout.

    Raises:
      UserError: if values or scales do not match their scheme or the architecture.
    """
    found = {}
    for tensor in tensors:
        plain = stored.get(tensor.name)
        # Vectors and convolutions have no scales.
        if (plain is not None and plain.dtype in DTYPES) or len(tensor.shape) not in (2, 3):
            continue
        # A layer may have been left in floating point by the release.
        quantized = _find(tensor, stored, schemes)
        if quantized is not None:
            found[tensor.name] = quantized
    return found


def _find(
    tensor: Tensor, stored: Mapping[str, StoredTensor], schemes: tuple[Scheme, ...]
) -> QuantizedTensor | None:
    # Scales are named after the module, and not after its weight.
    module = tensor.name.removesuffix(".weight")
    is_stacked = len(tensor.shape) == 3
    num_rows, num_columns = tensor.shape[-2:]
    shape = (tensor.shape[0] if is_stacked else 1, num_rows, num_columns)
    whole = _find_matrix(module, stored, schemes, shape, is_stacked=is_stacked)
    if whole is not None:
        matrix, names = whole
        return QuantizedTensor(tensor, tuple(((matrix, i),) for i in range(shape[0])), names)
    return _find_experts(tensor, module, stored, schemes) if is_stacked else None


def _find_experts(
    tensor: Tensor, module: str, stored: Mapping[str, StoredTensor], schemes: tuple[Scheme, ...]
) -> QuantizedTensor | None:
    """A stack whose experts are stored one by one."""
    match = _STACK.fullmatch(module)
    if match is None:
        return None
    count, num_rows, num_columns = tensor.shape
    # The first expert tells how gate and up are stored.
    for projections in _PROJECTIONS[match[2]]:
        modules = [[f"{match[1]}.{expert}.{name}" for name in projections] for expert in range(count)]
        if not any(_value_name(name, stored) for name in modules[0]):
            continue
        shape = (1, num_rows // len(projections), num_columns)
        found = [
            [_find_matrix(name, stored, schemes, shape, is_stacked=False) for name in each]
            for each in modules
        ]
        # A list of what is missing would be as long as the layer.
        missing = [name for names, each in zip(modules, found, strict=True)
                   for name, one in zip(names, each, strict=True) if one is None]  # fmt: skip
        if missing:
            raise UserError(f"{missing[0]} has no quantized weights, although {modules[0][0]} has")
        parts = [[one for one in each if one is not None] for each in found]
        names = frozenset().union(*(names for each in parts for _, names in each))
        return QuantizedTensor(
            tensor, tuple(tuple((matrix, 0) for matrix, _ in each) for each in parts), names
        )
    return None


def _value_name(module: str, stored: Mapping[str, StoredTensor]) -> str | None:
    names = (module + ending for ending in VALUE_ENDINGS)
    return next((name for name in names if name in stored and stored[name].dtype in VALUE_DTYPES), None)


def _check_dtype(module: str, stored: Mapping[str, StoredTensor]) -> None:
    """Checks that the module has no values of a type that is not known."""
    for name in (module + ending for ending in VALUE_ENDINGS):
        if name in stored and stored[name].dtype not in DTYPES:
            raise UserError(
                f"{name} is of type {stored[name].dtype}, which is not supported; values may be of type "
                f"{', '.join(VALUE_DTYPES)}"
            )


def _find_matrix(
    module: str,
    stored: Mapping[str, StoredTensor],
    schemes: tuple[Scheme, ...],
    shape: tuple[int, int, int],
    *,
    is_stacked: bool,
) -> tuple[StoredMatrix, frozenset[str]] | None:
    """The matrix of a module and the names of its tensors; None if the module has no quantized values."""
    values_name = _value_name(module, stored)
    if values_name is None:
        _check_dtype(module, stored)
        return None
    # In the order of how often releases use a name.
    scales_name = next((module + ending for ending in SCALE_ENDINGS if module + ending in stored), None)
    if scales_name is None:
        raise UserError(f"{values_name} has no scales; {module}{SCALE_ENDINGS[0]} is missing")
    values, scales = stored[values_name], stored[scales_name]
    name = VALUE_DTYPES[values.dtype]
    # Groups of a mixed config differ in their formats.
    fitting = tuple(scheme for scheme in schemes if scheme.codec.name == name)
    if not fitting:
        by = ", ".join(str(scheme) for scheme in schemes)
        raise UserError(f"{values_name} is of type {values.dtype}, but the quantization config only has {by}")
    scheme = matching_scheme(fitting, scales, scales_name, shape, is_stacked)
    matrix = StoredMatrix(values_name, scales_name, values, scales, scheme, shape)
    check_matrix(matrix, is_stacked=is_stacked)
    # Static scales of activations would be unknown tensors.
    ignored = {module + ending for ending in IGNORED_ENDINGS if module + ending in stored}
    return matrix, frozenset({values_name, scales_name, *ignored})
