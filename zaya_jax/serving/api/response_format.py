"""The field `response_format`: what form an answer must have, as a grammar."""

from zaya_jax.errors import UserError
from zaya_jax.inference.structured.compiler import require_package
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.inference.structured.grammar import Grammar, json_object_grammar, json_schema_grammar
from zaya_jax.serving.api.request_schema import ResponseFormat
from zaya_jax.serving.api.validation import one_line
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.loaded_model import LoadedModel

PARAM = "response_format"
_SCHEMA = "response_format.json_schema.schema"


def read_response_format(field: ResponseFormat | None) -> Grammar | None:
    """Returns the grammar of an answer; None if it may be any text.

    Raises:
      ApiError: if the schema is refused, or the server lacks the package that answers need.
    """
    if field is None or field.type == "text":
        return None
    try:
        require_package(f'{PARAM} with the type "{field.type}"')
        if field.type == "json_object":
            return json_object_grammar()
        if field.json_schema is None:
            raise ApiError(f"{PARAM}.json_schema is missing", param=PARAM)
        return json_schema_grammar(field.json_schema.json_schema, _SCHEMA)
    except UserError as error:
        raise ApiError(one_line(error), param=PARAM) from None


def compile_constraint(model: LoadedModel, grammar: Grammar, *, is_chat: bool) -> Constraint:
    """Compiles the grammar of an answer. It may take seconds: call it in a thread.

    Args:
      model: model that answers.
      grammar: grammar of the answer.
      is_chat: whether the model may think before the answer.

    Raises:
      ApiError: if the grammar is refused.
    """
    chat_format = model.chat_format if is_chat else None
    think_ids = None if chat_format is None else chat_format.think_ids
    try:
        return model.grammars.compile(grammar, think_ids, name=_SCHEMA)
    except UserError as error:
        raise ApiError(one_line(error), param=PARAM) from None


def generation_error(error: Exception) -> ApiError:
    """Returns the error of an answer that cannot be continued."""
    # The grammar was accepted, and exceeded a limit only after some tokens: the client can change it.
    if isinstance(error, UserError):
        return ApiError(one_line(error), param=PARAM)
    # The message is about the network or the device, and contains nothing of the request.
    return ApiError(f"generation failed: {error}", status=500, kind="server_error")
