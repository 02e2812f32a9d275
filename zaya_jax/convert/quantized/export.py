"""Tensors of an export with quantized experts, in compressed-tensors' form.

The experts' matrices are quantized, and by option the embedding. Everything else stays as it is:
convolutions, temperatures, norms, residual scaling, routers, biases and balancing biases.

Letters: R outputs, C inputs.
"""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.convert.nonfinite import count_nonfinite
from zaya_jax.convert.pytorch.layouts import Tensor, WeightSlice
from zaya_jax.convert.quantized.codecs import CODECS, Codec, FormatName, QuantizedValues
from zaya_jax.convert.quantized.schemes import compressed_tensors_config
from zaya_jax.convert.stream import Block, Source, contiguous
from zaya_jax.errors import UserError

EXPERT_MATRICES = ("layers/experts/gate_up_proj", "layers/experts/down_proj")
EMBEDDING_PATH = "embedding/table"
ExpertTensors = Literal["separate", "stacked"]
"""Tensors of the native layout's experts: one per expert and projection, or one stack of all experts."""


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What an export quantizes.

    Attributes:
      format: format of the experts' matrices.
      embedding: whether the embedding, and so the tied head, is int8 with one scale per token.
      expert_tensors: how the native layout stores experts.
    """

    format: FormatName
    embedding: bool = False
    expert_tensors: ExpertTensors = "separate"

    @property
    def codec(self) -> Codec:
        """Format of the experts' matrices."""
        return CODECS[self.format]

    def codec_of(self, path: str) -> Codec | None:
        """Format of a weight; None if it stays in floating point."""
        # Attention is 3% of the weights: its matrices would save little.
        if path in EXPERT_MATRICES:
            return self.codec
        return CODECS["int8"] if self.embedding and path == EMBEDDING_PATH else None

    def config_fields(self) -> dict[str, Any]:
        """Fields that config.json needs so that vLLM and SGLang recognize the format."""
        return {"quantization_config": compressed_tensors_config(self.codec, with_embedding=self.embedding)}

    def check(self, config: ModelConfig) -> None:
        """Checks that the format supports the sizes of the experts.

        Raises:
          UserError: if rows are not a multiple of the format's blocks.
        """
        # Padding would change the shapes that other readers expect.
        block = self.codec.group_size
        for field in ("hidden_size", "moe_intermediate_size"):
            if block and getattr(config, field) % block:
                raise UserError(
                    f"model.{field} is {getattr(config, field)}; {self.format} needs a multiple of {block}; "
                    "use --quantize=fp8 or int8"
                )


@dataclasses.dataclass(frozen=True)
class _Scales:
    """Scales of matrices whose values were written, until they are written too.

    Without them each matrix would be read and quantized twice. They are small: a value per output, or a byte
    for 32 weights.
    """

    waiting: dict[Any, np.ndarray] = dataclasses.field(default_factory=dict)
    locks: dict[Any, threading.Lock] = dataclasses.field(default_factory=dict)

    def lock(self, key: Any) -> threading.Lock:
        """Lock of a matrix: its scales wait while another thread quantizes it."""
        return self.locks.setdefault(key, threading.Lock())


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedBlock(Block):
    """Values or scales of some outputs of a slice, in an output file.

    Attributes:
      codec: format of the values.
      part: what is written.
      rows: outputs of the slice that are written.
      num_columns: C, the number of inputs.
      scales: scales that wait to be written.
    """

    codec: Codec
    part: Literal["values", "scales"]
    rows: slice
    num_columns: int
    scales: _Scales

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the values or scales."""
        # Rows are outputs, in the order of the layout.
        num_rows = self.rows.stop - self.rows.start
        if self.part == "values":
            return num_rows, self.num_columns // self.codec.values_per_byte
        return num_rows, self.codec.num_groups(self.num_columns)

    @property
    def size(self) -> int:
        """Size in the file in bytes."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def num_values(self) -> int:
        """Number of weights that the block has the values of."""
        return self.shape[0] * self.num_columns if self.part == "values" else 0

    def load(self, source: Source) -> np.ndarray:
        """Reads and quantizes the outputs, or returns scales that are waiting."""
        key = (self.weight_slice, self.rows.start)
        with self.scales.lock(key):
            # Values come first in every file, so that their scales are ready when they are needed.
            if self.part == "values":
                quantized = self._encode(source)
                self.scales.waiting[key] = quantized.scales
                return quantized.values
            # None if an earlier attempt has written the values.
            scales = self.scales.waiting.pop(key, None)
            return self._encode(source).scales if scales is None else scales

    def _encode(self, source: Source) -> QuantizedValues:
        array = self.arrange(source.read(self.weight_slice))
        # Gate and up are one matrix of a slice, of which a projection is a half.
        matrix = contiguous(array).reshape(-1, self.num_columns)[self.rows]
        # A NaN would become the scale of its whole group, or a large number.
        if count := count_nonfinite(np.ascontiguousarray(matrix)):
            where = ", ".join(map(str, self.weight_slice.start))
            raise UserError(
                f"{self.weight_slice.path}[{where}] has {count:,} values that are NaN or infinite, which "
                f"{self.codec.name} cannot represent"
            )
        return self.codec.encode(matrix.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class OutputTensor:
    """A tensor of an output file.

    Attributes:
      name: name of the tensor.
      dtype: name of its type in safetensors.
      shape: sizes of its axes.
      blocks: parts that it consists of, in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        """Size of the tensor in the exported file, in bytes."""
        return sum(block.size for block in self.blocks)


def quantized_tensors(tensor: Tensor, codec: Codec, expert_tensors: ExpertTensors) -> list[OutputTensor]:
    """The values and scales of a tensor, in compressed-tensors' names."""
    # The legacy layout has separate experts anyway.
    if len(tensor.shape) == 3 and expert_tensors == "separate":
        return list(_separate(tensor, codec))
    num_rows, num_columns = tensor.shape[-2:]
    # A slice is a whole matrix of a stack, or some rows of the embedding.
    rows = [slice(0, weight_slice.size // num_columns) for weight_slice in tensor.slices]
    module = tensor.name.removesuffix(".weight")
    # In a stack, Zyphra's releases name 8-bit values as the weights themselves.
    name = module if module == tensor.name and codec.values_per_byte == 1 else None
    stack = tensor.shape[:-2]
    return _pair(tensor, module, codec, list(zip(tensor.slices, rows, strict=True)), (*stack, num_rows), name)


def _separate(tensor: Tensor, codec: Codec) -> Iterator[OutputTensor]:
    """One tensor per expert and projection, as llm-compressor, vLLM and SGLang have them."""
    prefix, _, stack = tensor.name.rpartition(".")
    # Engines join gate and up themselves, in an order that suits their kernels.
    names = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack,)
    num_rows = tensor.shape[1] // len(names)
    for expert, weight_slice in enumerate(tensor.slices):
        for number, name in enumerate(names):
            rows = slice(number * num_rows, (number + 1) * num_rows)
            module = f"{prefix}.{expert}.{name}"
            yield from _pair(tensor, module, codec, [(weight_slice, rows)], (num_rows,), None)


def _pair(
    tensor: Tensor,
    module: str,
    codec: Codec,
    slices: list[tuple[WeightSlice, slice]],
    rows_shape: tuple[int, ...],
    values_name: str | None,
) -> list[OutputTensor]:
    num_columns, scales = tensor.shape[-1], _Scales()
    outputs = []
    parts: tuple[tuple[Literal["values", "scales"], str, int], ...] = (
        ("values", codec.values_dtype, num_columns // codec.values_per_byte),
        ("scales", codec.scales_dtype, codec.num_groups(num_columns)),
    )
    # Scales follow their values, as readers that map files expect.
    for part, dtype, num in parts:
        # All blocks of a tensor share the scales that wait.
        blocks = tuple(
            EncodedBlock(
                each,
                _NUMPY[dtype],
                tensor.layout.to_theirs,
                codec=codec,
                part=part,
                rows=rows,
                num_columns=num_columns,
                scales=scales,
            )
            for each, rows in slices
        )
        ending = ".weight_scale" if part == "scales" else _VALUES_ENDING[codec.name]
        name = values_name if part == "values" and values_name else module + ending
        outputs.append(OutputTensor(name, dtype, (*rows_shape, num), blocks))
    return outputs


_NUMPY = {"F8_E4M3": np.dtype(np.uint8), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8),
          "F32": np.dtype(np.float32)}  # fmt: skip
"""Types in memory; E4M3 values are their bits."""
_VALUES_ENDING = {"fp8": ".weight", "int8": ".weight", "mxfp4": ".weight_packed"}
