"""`zaya convert`, with what it needs from inference: the loss of a model before and after quantization."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.convert import command
from zaya_jax.convert.quantized.device_weights import load_dense_variables
from zaya_jax.convert.quantized.report import HeldOutLoss
from zaya_jax.convert.stream import Source
from zaya_jax.data.tokenizers.saved_tokenizer import with_saved_tokenizer
from zaya_jax.data.tokenizers.tokenizer import tokenizer_of
from zaya_jax.inference.evaluation.scoring import make_scorer
from zaya_jax.inference.evaluation.text_loss import Text, TextLoss, encode_texts, evaluate_texts, read_texts
from zaya_jax.inference.loading import load_run
from zaya_jax.model.weights import count_parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.platform.host_memory import available_memory


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya convert`.

    Args:
      argv: arguments that follow `zaya convert` on the command line.

    Raises:
      UserError: if the weights cannot be converted.
    """
    command.main(argv, measure_loss=measure_loss)


def measure_loss(source: Source, quantized: pathlib.Path, files: Sequence[str]) -> HeldOutLoss | str:
    """Evaluates text files with the weights before and after quantization, one after the other.

    Args:
      source: the weights that were quantized.
      quantized: folder of the quantized weights, whose tokenizer and compute dtype both sides use.
      files: UTF-8 text files.

    Returns:
      Both losses, or why they were not measured.

    Raises:
      UserError: for a file that is empty or not UTF-8.
    """
    texts = list(read_texts(files))
    run = load_run(str(quantized))
    tokenizer = tokenizer_of(with_saved_tokenizer(quantized, run.config.data))
    encoded = encode_texts([(pathlib.Path(name).name, text) for name, text in texts], tokenizer)
    model, first_id = Zaya(run.config.model, run.config.execution), tokenizer.delimiters.first_id
    length = run.config.data.sequence_length
    after = _loss(model, run.variables, encoded, length, first_id)
    # Released before the larger weights are loaded.
    del run
    needed = count_parameters(model.config) * np.dtype(model.execution.dtype).itemsize
    # Skipping is better than being killed for memory after a successful conversion.
    if needed > (available := available_memory()):
        return (
            f"the loss is {after.nats_per_token:.4f} nats per token after quantization; before, it was not "
            "measured: "
            f"the weights need {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
        )
    variables = load_dense_variables(source, model.execution.dtype)
    before = _loss(model, variables, encoded, length, first_id)
    names = tuple(text.name for text in encoded)
    return HeldOutLoss(names, after.num_tokens, before.nats_per_token, after.nats_per_token)


def _loss(
    model: Zaya, variables: Mapping[str, Any], texts: list[Text], length: int, first_id: int
) -> TextLoss:
    scorer = make_scorer(model, variables, length=length, prefix_id=first_id)
    return evaluate_texts(scorer, texts).total
