"""Network and batches that both sides of `zaya bench torch` run, and what a call of either side reports."""

import dataclasses
import pathlib
from typing import Any, cast

import jax
import numpy as np

from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.convert.pytorch.in_memory import save_pytorch
from zaya_jax.model.zaya import Zaya

MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    moe_intermediate_size=512,
    num_experts=8,
    router_hidden_size=64,
    max_position_embeddings=4096,
)
DTYPES = "float32", "bfloat16"
"""Types of matrix products."""


TOKENS = "tokens"
"""Name of an output: new tokens, [batch, new]."""


@dataclasses.dataclass(frozen=True)
class TrainingWork:
    """Train steps on one batch.

    Attributes:
      folder: folder of the exported network.
      dtype: type of matrix products, one of `DTYPES`; weights are float32.
      batch: number of rows.
      length: tokens per row.
      learning_rate: constant learning rate of AdamW.
    """

    folder: str
    dtype: str = "float32"
    batch: int = 8
    length: int = 256
    learning_rate: float = 1e-5

    @property
    def tokens(self) -> np.ndarray:
        """Random tokens, shape [batch, length], identical for both sides."""
        return np.random.default_rng(0).integers(1, MODEL.vocab_size, (self.batch, self.length))


@dataclasses.dataclass(frozen=True)
class GenerationWork:
    """Prompts that are continued greedily.

    Attributes:
      folder: folder of the exported network.
      batch: number of prompts.
      dtype: type of matrix products and of the matrices, one of `DTYPES`.
      vocabulary: vocabulary size.
      prompt: tokens per prompt.
      new: new tokens per prompt.
    """

    folder: str
    batch: int
    dtype: str = "float32"
    vocabulary: int = MODEL.vocab_size
    prompt: int = 128
    new: int = 32

    @property
    def prompts(self) -> np.ndarray:
        """Random prompt tokens, shape [batch, prompt], identical for both sides."""
        return np.random.default_rng(0).integers(1, self.vocabulary, (self.batch, self.prompt))


@dataclasses.dataclass(frozen=True)
class Call:
    """Times and outputs of one call of a program.

    Attributes:
      seconds: wall time of each timed part, such as "prefill" and "decode".
      outputs: numbers that both sides must agree on, by name.
      setting: how the program computes, if it selected a setting by its speed; otherwise "".
    """

    seconds: dict[str, float]
    outputs: dict[str, np.ndarray]
    setting: str = ""


def execution(work: TrainingWork | GenerationWork) -> ExecutionConfig:
    """Returns the execution of our side: products in the work's dtype, with the defaults of this platform."""
    return ExecutionConfig(dtype=cast(Any, work.dtype))


def export(folder: pathlib.Path) -> str:
    """Exports random weights that both sides load, and returns the folder's name."""
    model = Zaya(MODEL)
    # The weights of the initialization serve: speed depends on them by the routing alone.
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    save_pytorch(folder, model, variables, dtype="float32")
    return str(folder)
