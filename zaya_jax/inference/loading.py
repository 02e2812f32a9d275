"""Loads a run for generation: its model, its weights in the compute dtype, and its tokenizer.

A folder of quantized PyTorch weights can be loaded like a run.
"""

import dataclasses
import sys
from collections.abc import Mapping

from zaya_jax import checkpoint
from zaya_jax.checkpoint import SavedRun, WeightsKind
from zaya_jax.config import Config
from zaya_jax.data.chats.templates.encoding import ChatFormat, load_chat_format
from zaya_jax.data.chats.templates.template import ZAYA, load_template
from zaya_jax.data.tokenizers.saved_tokenizer import saved_chat_template, with_saved_tokenizer
from zaya_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.errors import UserError
from zaya_jax.inference import quantized_folder
from zaya_jax.inference.engine.decoder import cast_matrices
from zaya_jax.inference.finite_weights import check_finite
from zaya_jax.model.zaya import Zaya
from zaya_jax.platform.host_memory import use_large_pages


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run that can generate text.

    Attributes:
      folder: folder of the run.
      step: step of the newest checkpoint, which the weights come from.
      model: the model.
      variables: weights, matrices in the compute dtype.
      tokenizer: tokenizer that the run folder keeps.
      weights: which weights of the checkpoint these are.
    """

    folder: str
    step: int
    model: Zaya
    variables: Mapping
    tokenizer: Tokenizer
    weights: WeightsKind = "raw"

    def chat_format(self, template: str | None) -> ChatFormat:
        """Returns the chat format of a template, or of the run for None.

        Raises:
          UserError: as `load_chat_format`, and without a template as `require_chats`.
        """
        # A template that the user names is applied even to a run that was trained on texts.
        if template is None and not has_chat_template(self.folder, self.tokenizer):
            raise _no_chats(self.folder)
        return load_chat_format(template or saved_chat_template(self.folder), self.tokenizer)


def load_run(run_folder: str, weights: WeightsKind = "raw") -> SavedRun:
    """Reads the newest weights of a run, or those of a folder with quantized weights.

    Args:
      run_folder: path of the folder.
      weights: the weights to read, "raw" or their average, "ema".

    Raises:
      UserError: as `zaya_jax.checkpoint.load_run`; or if the average of a quantized folder is requested.
    """
    # Before the checks for a run, whose messages would not help.
    if quantized_folder.is_quantized(run_folder):
        if weights != "raw":
            raise UserError(f"{run_folder} is quantized and has no average; remove --weights={weights}")
        return quantized_folder.load(run_folder)
    return checkpoint.load_run(run_folder, weights)


def read_config(run_folder: str) -> Config:
    """Reads the config of a run, or makes one for a folder with quantized weights.

    Raises:
      UserError: as `zaya_jax.checkpoint.read_config`.
    """
    if quantized_folder.is_quantized(run_folder):
        return quantized_folder.config_of(run_folder)
    return checkpoint.read_config(run_folder)


def has_chat_template(run_folder: str, tokenizer: Tokenizer) -> bool:
    """Returns whether a run was trained on chats, or its tokenizer has a chat template.

    Raises:
      UserError: as `load_template`.
    """
    if saved_chat_template(run_folder) is not None:
        return True
    # `load_template` falls back to the built-in template, which proves nothing about the run.
    return load_template(None, tokenizer).name != ZAYA


def require_chats(run_folder: str, template: str | None) -> None:
    """Rejects a run without a chat template, before its weights are read.

    Args:
      run_folder: folder of the run.
      template: chat template that the user names; None to require one of the run.

    Raises:
      UserError: if the run was trained on texts alone, and its tokenizer has no chat template.
    """
    if template is not None:
        return
    tokenizer = tokenizer_of(with_saved_tokenizer(run_folder, read_config(run_folder).data))
    if not has_chat_template(run_folder, tokenizer):
        raise _no_chats(run_folder)


def _no_chats(run_folder: str) -> UserError:
    return UserError(
        f"{run_folder} has no chat template: it was trained on texts, not on chats; zaya generate continues "
        "a text, zaya train --config=configs/sft.py trains on chats, and --template zaya, or that of a Jinja "
        "file, chats with it all the same"
    )


def load_for_generation(run_folder: str, weights: WeightsKind = "raw") -> LoadedRun:
    """Reads the newest weights of a run.

    Args:
      run_folder: folder of the run.
      weights: the weights to read, "raw" or their average, "ema".

    Raises:
      UserError: as `load_run`, `check_finite` and `tokenizer_of`.
    """
    run = load_run(run_folder, weights)
    # From weights that are not finite, sampling would return arbitrary tokens without any error.
    check_finite(run.variables, run_folder, run.step)
    model = Zaya(run.config.model, run.config.execution)
    tokenizer = tokenizer_of(with_saved_tokenizer(run_folder, run.config.data))
    variables = cast_matrices(model, run.variables)
    use_large_pages(variables)
    return LoadedRun(run_folder, run.step, model, variables, tokenizer, weights)


def show_progress(message: str) -> None:
    """Prints what a command is doing to standard error, if that is a terminal."""
    # A pipe or a log file gets only what is worth keeping; a person would otherwise see nothing for a minute.
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)
