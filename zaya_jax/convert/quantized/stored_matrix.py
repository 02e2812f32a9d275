"""A quantized matrix in safetensors files: its values and its scales, read by outputs.

Letters: E matrices of a stack, R outputs, C inputs, G groups of inputs that share a scale.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from zaya_jax.convert.pytorch.safetensors_file import StoredTensor
from zaya_jax.convert.quantized.codecs import E8M0_NAN, QuantizedValues
from zaya_jax.convert.quantized.schemes import Scheme
from zaya_jax.errors import UserError

ReadBytes = Callable[[StoredTensor, int, int], np.ndarray]
"""Function that reads bytes of a tensor: of tensor, from offset, that many, as uint8 [size]."""
_SCALES_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """Matrices [E, R, C] in files, as values and scales.

    Attributes:
      values_name: name of the tensor of values, for messages.
      scales_name: name of the tensor of scales, for messages.
      values: position of the values.
      scales: position of the scales.
      scheme: how the matrix is quantized.
      shape: E, R and C.
    """

    values_name: str
    scales_name: str
    values: StoredTensor
    scales: StoredTensor
    scheme: Scheme
    shape: tuple[int, int, int]

    def read(self, read_bytes: ReadBytes, index: int, rows: slice) -> QuantizedValues:
        """Reads some outputs of matrix `index`, with their scales expanded to [R, G] or [R, 1].

        Raises:
          UserError: if a scale is not a number.
        """
        _, _, num_columns = self.shape
        # Rows are contiguous, so that a part of them is one read.
        width = num_columns // self.scheme.codec.values_per_byte
        first = (index * self.shape[1] + rows.start) * width
        num_rows = rows.stop - rows.start
        raw = read_bytes(self.values, first, num_rows * width).reshape(num_rows, width)
        # Only integers have a sign that NumPy must know; other values are looked up by their bits.
        values = raw.view(np.int8) if self.scheme.codec.name == "int8" else raw
        return QuantizedValues(values, self._read_scales(read_bytes, index, rows))

    def _read_scales(self, read_bytes: ReadBytes, index: int, rows: slice) -> np.ndarray:
        # All scales of the matrix: blocks are shared by rows, and scales are small.
        size = self.scales.size // self.shape[0]
        raw = read_bytes(self.scales, index * size, size)
        if self.scheme.codec.name == "mxfp4":
            is_bad = bool((raw == E8M0_NAN).any())
            scales = raw.reshape(self.shape[1], -1)[rows]
        else:
            scales = self._expanded(_as_float32(raw, self.scales.dtype))[rows]
            is_bad = not np.isfinite(scales).all()
        # One such scale would make all weights of its group NaN.
        if is_bad:
            raise UserError(f"{self.scales_name} of matrix {index} has a scale that is not a number")
        return scales

    def _expanded(self, scales: np.ndarray) -> np.ndarray:
        """Scales [R, G] with groups of equal size, from those of the strategy."""
        _, num_rows, num_columns = self.shape
        # Every form becomes one scale per output and group, so that products know one form only.
        if self.scheme.strategy == "tensor":
            return np.broadcast_to(scales.reshape(1, 1), (num_rows, 1))
        if self.scheme.strategy == "channel":
            return scales.reshape(num_rows, 1)
        assert self.scheme.block is not None, "checked when the config was read"
        (height, width), across = self.scheme.block, math.ceil(num_columns / self.scheme.block[1])
        per_row = np.repeat(scales.reshape(-1, across), height, axis=0)[:num_rows]
        # The last block may be narrower. Groups of the largest common size have equal ones.
        group = math.gcd(width, num_columns)
        columns = np.repeat(np.arange(across), width // group)[: num_columns // group]
        return per_row[:, columns]


def _as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        # The upper half of a float32.
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(_SCALES_DTYPES[dtype]).astype(np.float32)


def check_matrix(matrix: StoredMatrix, *, is_stacked: bool) -> None:
    """Checks types and shapes of the values and scales of a matrix.

    Args:
      matrix: the matrix.
      is_stacked: whether the tensors have the axis E.

    Raises:
      UserError: if they do not match the scheme; the message names the tensor.
    """
    codec, (count, num_rows, num_columns) = matrix.scheme.codec, matrix.shape
    stack = (count,) if is_stacked else ()
    if codec.group_size is not None and num_columns % codec.group_size:
        raise UserError(
            f"{matrix.values_name} has rows of {num_columns} weights; {codec.name} needs a multiple of "
            f"{codec.group_size}"
        )
    expected = (*stack, num_rows, num_columns // codec.values_per_byte)
    # transformers stores the bytes of each block of 32 along a separate axis.
    by_block = (*stack, num_rows, num_columns // 32, 16)
    shapes = (expected, by_block) if codec.name == "mxfp4" else (expected,)
    # The type of four bits counts values and not bytes.
    if matrix.values.dtype == "F4":
        shapes = ((*stack, num_rows, num_columns),)
    _check_shape(matrix.values_name, matrix.values.shape, shapes, str(matrix.scheme))
    # Both names have the same bits.
    types = ("U8", "F8_E8M0") if codec.name == "mxfp4" else ("F32", "BF16", "F16")
    if matrix.scales.dtype not in types:
        raise UserError(
            f"{matrix.scales_name} is of type {matrix.scales.dtype}; scales of {codec.name} must be of type "
            f"{' or '.join(types)}"
        )


def matching_scheme(
    schemes: tuple[Scheme, ...],
    scales: StoredTensor,
    scales_name: str,
    shape: tuple[int, int, int],
    is_stacked: bool,
) -> Scheme:
    """The scheme that the scales' shape belongs to.

    Raises:
      UserError: if there is none.
    """
    stack = (shape[0],) if is_stacked else ()
    allowed = {(*stack, *each): scheme for scheme in schemes for each in scheme.scales_shapes(*shape[1:])}
    if scales.shape not in allowed:
        by = " or ".join(str(scheme) for scheme in schemes)
        _check_shape(scales_name, scales.shape, tuple(allowed), by)
    return allowed[scales.shape]


def _check_shape(name: str, actual: tuple[int, ...], allowed: tuple[tuple[int, ...], ...], by: str) -> None:
    if actual not in allowed:
        expected = " or ".join(str(list(each)) for each in allowed)
        raise UserError(
            f"{name} has shape {list(actual)}; it must be {expected}, because the weights are {by}"
        )


def joined(parts: list[QuantizedValues]) -> QuantizedValues:
    """Joins matrices by outputs, such as gate and up."""
    if len(parts) == 1:
        return parts[0]
    # Gate and up of one expert have the same scheme in practice, but need not.
    groups = max(part.scales.shape[1] for part in parts)
    scales = [np.repeat(part.scales, groups // part.scales.shape[1], axis=1) for part in parts]
    return QuantizedValues(np.concatenate([part.values for part in parts]), np.concatenate(scales))
