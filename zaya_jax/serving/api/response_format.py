"""The field `response_format`: what form an answer must have, as a grammar."""

from zaya_jax.errors import UserError
from zaya_jax.inference.structured.compiler import require_package
from zaya_jax.inference.structured.grammar import json_object_grammar, json_schema_grammar
from zaya_jax.serving.api.answer_grammar import AnswerGrammar
from zaya_jax.serving.api.request_schema import ResponseFormat
from zaya_jax.serving.api.validation import one_line
from zaya_jax.serving.http.errors import ApiError

PARAM = "response_format"
_SCHEMA = "response_format.json_schema.schema"


def read_response_format(field: ResponseFormat | None) -> AnswerGrammar | None:
    """Returns the grammar of an answer; None if it may be any text.

    Raises:
      ApiError: if the schema is refused, or the server lacks the package that answers need.
    """
    if field is None or field.type == "text":
        return None
    try:
        require_package(f'{PARAM} with the type "{field.type}"')
        if field.type == "json_object":
            return AnswerGrammar(json_object_grammar(), PARAM, PARAM)
        if field.json_schema is None:
            raise ApiError(f"{PARAM}.json_schema is missing", param=PARAM)
        schema = json_schema_grammar(field.json_schema.json_schema, _SCHEMA)
        return AnswerGrammar(schema, PARAM, _SCHEMA)
    except UserError as error:
        raise ApiError(one_line(error), param=PARAM) from None
