"""The grammar that the answer to a request must match, and the errors of answers that cannot."""

import dataclasses

from zaya_jax.errors import UserError
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.inference.structured.grammar import Grammar
from zaya_jax.serving.api.validation import one_line
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.loaded_model import LoadedModel


@dataclasses.dataclass(frozen=True)
class AnswerGrammar:
    """A grammar, and where in the request it comes from.

    Attributes:
      grammar: grammar of the answer.
      param: field of the request that errors name.
      name: how error messages call what the client wrote there.
    """

    grammar: Grammar
    param: str
    name: str


def compile_constraint(model: LoadedModel, answer: AnswerGrammar, *, is_chat: bool) -> Constraint:
    """Compiles the grammar of an answer. It may take seconds: call it in a thread.

    Args:
      model: model that answers.
      answer: grammar of the answer.
      is_chat: whether the model may think before the answer.

    Raises:
      ApiError: if the grammar is refused.
    """
    chat_format = model.chat_format if is_chat else None
    think_ids = None if chat_format is None else chat_format.think_ids
    try:
        return model.grammars.compile(answer.grammar, think_ids, name=answer.name)
    except UserError as error:
        raise ApiError(one_line(error), param=answer.param) from None


def generation_error(error: Exception, answer: AnswerGrammar | None) -> ApiError:
    """Returns the error of an answer that cannot be continued."""
    # The grammar was accepted, and exceeded a limit only after some tokens: the client can change it.
    if isinstance(error, UserError):
        return ApiError(one_line(error), param=answer.param if answer else None)
    # The message is about the network or the device, and contains nothing of the request.
    return ApiError(f"generation failed: {error}", status=500, kind="server_error")
