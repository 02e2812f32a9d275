"""A run, ready to write: its network, its weights in the type of its products, its tokenizer."""

import dataclasses
from collections.abc import Mapping

from zaya_jax.checkpoint import load_run
from zaya_jax.data.chat_format import ChatFormat, load_chat_format
from zaya_jax.data.kept_tokenizer import as_kept, kept_template
from zaya_jax.data.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.inference.generate import cast_matrices
from zaya_jax.model.zaya import Zaya


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """What of a run it takes to write.

    Attributes:
      folder: of the run.
      step: of its newest checkpoint, whose weights these are.
      model: its network.
      variables: the weights, matrices cast once and not at every prompt.
      tokenizer: the one that its folder keeps.
    """

    folder: str
    step: int
    model: Zaya
    variables: Mapping
    tokenizer: Tokenizer

    def chat_format(self, template: str | None) -> ChatFormat:
        """How it was taught chats, or how a template of the user's writes them.

        Raises:
          ValueError: as `load_chat_format`.
        """
        return load_chat_format(template or kept_template(self.folder), self.tokenizer)


def load_for_writing(run_folder: str) -> LoadedRun:
    """Reads the newest weights of a run.

    Raises:
      ValueError: as `load_run` and `tokenizer_of`.
    """
    run = load_run(run_folder)
    model = Zaya(run.config.model, run.config.execution)
    tokenizer = tokenizer_of(as_kept(run_folder, run.config.data))
    return LoadedRun(run_folder, run.step, model, cast_matrices(model, run.variables), tokenizer)
