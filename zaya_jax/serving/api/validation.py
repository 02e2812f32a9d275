"""Validates JSON bodies with pydantic, and turns its errors into errors of OpenAI's API.

The models are in `request_schema`. pydantic finds the errors; this module selects the one that a client sees,
and writes it as one line of ASCII with `param`, `code` and a status.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from zaya_jax.fields import did_you_mean
from zaya_jax.files.json_files import parse_object
from zaya_jax.serving.http.errors import ApiError

MAX_PREVIEW_CHARACTERS = 60
"""Maximum length of a client's value or field name in an error message."""
MAX_MESSAGE_CHARACTERS = 500
Location = tuple[str | int, ...]
"""Place of a value in a body, as pydantic reports it: names of fields and indices of lists."""
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "at least {min_length} characters long",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}
"""What a value must be, by pydantic's type of the error, where pydantic's own words are about Python."""


def custom_error(text: str, *, code: str | None = None, status: int = 400) -> PydanticCustomError:
    """Returns an error that a validator can raise.

    Args:
      text: what is wrong, and how to fix it; the message begins with the path of the field.
      code: OpenAI's name of the error; None if it has none.
      status: HTTP status of the response.
    """
    return PydanticCustomError("custom", "{text}", {"text": text, "code": code, "status": status})


def check_utf8(text: str) -> str:
    """Refuses text that cannot be encoded as UTF-8."""
    # JSON can spell half a surrogate pair, and pydantic accepts it. Tokenizers and responses cannot encode
    # it.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise custom_error(f"has half a surrogate pair at character {error.start}; it must be text") from None
    return text


Text = Annotated[str, pydantic.AfterValidator(check_utf8)]
"""Text that can be encoded as UTF-8."""
_TEXT = pydantic.TypeAdapter(Text)


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Marks a field of OpenAI's API that this server accepts only with a value that has no effect.

    pydantic's `Literal` does less: it distinguishes 0 from 0.0, and cannot contain lists and objects.

    Attributes:
      defaults: accepted values, in addition to null.
    """

    defaults: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Returns the schema of a marked field."""
        del source, handler
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> Any:
        # False equals 0 in Python: a number that is false is accepted as 0, which harms nobody.
        if value not in self.defaults:
            text = f"is {preview(value)}, which is not supported by this server; omit it"
            raise custom_error(text, code="unsupported_parameter")
        return value


class BodyModel(pydantic.BaseModel):
    """An object of a request body. A field that is null counts as missing; an unknown field is an error.

    Attributes:
      inner_models: models of objects within this one, by the name of their field.
      drops_unknown_nulls: whether an unknown field that is null counts as missing. Clients write such fields
        when they send back parts of a response.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)
    inner_models: ClassVar[Mapping[str, type["BodyModel"]]] = {}
    drops_unknown_nulls: ClassVar[bool] = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = field_names(cls)
        known = {name: value for name, value in values.items() if name in fields and value is not None}
        # Keep only one unknown field. A body of 1 MiB can have 90,000 of them, and pydantic would hold
        # Python's lock for half a second to report all. The name is escaped because pydantic cannot report a
        # name with half a surrogate pair.
        may_be_null = cls.drops_unknown_nulls
        unknown = next(
            (name for name in values if name not in fields and not (may_be_null and values[name] is None)),
            None,
        )
        known = cls._complete(known)
        return known if unknown is None else known | {_escape(unknown): values[unknown]}

    @classmethod
    def _complete(cls, known: dict[str, Any]) -> dict[str, Any]:
        """Adds fields that may be missing only together with others."""
        return known


def field_names(model: type[BodyModel]) -> dict[str, str]:
    """Returns the names of a model's attributes by the names of their fields in JSON."""
    # A field that pydantic reserves as a name, such as "schema", has an alias.
    return {info.alias or name: name for name, info in model.model_fields.items()}


Model = TypeVar("Model", bound=BodyModel)


def parse_body(body: bytes) -> dict[str, Any]:
    """Parses the JSON object of a request body.

    pydantic's JSON parser does less: if a key is repeated, it silently uses the last value.

    Raises:
      ApiError: if the body is not a JSON object, or has a key twice.
    """
    try:
        return parse_object(body, "the body")
    except ValueError as error:
        raise ApiError(one_line(error)) from None


def validate(model: type[Model], values: Mapping[str, Any], context: Any = None) -> Model:
    """Validates a parsed body.

    Args:
      model: pydantic model of the body.
      values: parsed JSON object.
      context: what validators of the model can read as `info.context`.

    Raises:
      ApiError: for the first error in the order of the model's fields; unknown fields come last.
    """
    try:
        return model.model_validate(values, context=context)
    except pydantic.ValidationError as error:
        raise _api_error(model, error.errors(include_url=False)[0]) from None


def _api_error(model: type[BodyModel], error: ErrorDetails) -> ApiError:
    """Converts an error of pydantic to one of OpenAI's API."""
    kind, location, details = error["type"], error["loc"], error.get("ctx", {})
    path, param = _path(location), _param(location)
    if kind == "custom":
        message = f"{path} {details['text']}"
        return ApiError(message, param=param, code=details["code"], status=details["status"])
    if kind == "extra_forbidden":
        for name in location:
            model = model.inner_models.get(str(name), model)
        message = _unknown_field(model, str(location[-1]), _path(location[:-1]))
        return ApiError(message, param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(f"{path} is missing", param=_param(location[:-1] or location))
    expected = _EXPECTED.get(kind, "").format(**details) or error["msg"].removeprefix("Input should be ")
    return invalid_value(path, error["input"], expected, param=param)


def _unknown_field(model: type[BodyModel], name: str, parent: str) -> str:
    fields = field_names(model)
    supported = [
        field
        for field, name_in_model in fields.items()
        if not any(isinstance(mark, Unsupported) for mark in model.model_fields[name_in_model].metadata)
    ]
    subject = f'unknown field "{name}"' + (f" in {parent}" if parent else "")
    # Suggest unsupported fields too: their own error says more than "unknown".
    hint = did_you_mean(name, fields)
    return f"{subject}; {f'{hint} ' if hint else ''}supported are {', '.join(sorted(supported))}"


def _path(location: Location) -> str:
    """Writes a location as in JavaScript: messages[1].content."""
    # pydantic includes the tag of a union's member in a location. Tags are in angle brackets.
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if "<" not in str(part)
    ]
    return "".join(parts).removeprefix(".")


def _param(location: Location) -> str:
    """Returns OpenAI's `param`: a message, its content, or the plain name of any other field."""
    if (
        location[:1] == ("messages",)
        and len(location) > 1
        and (len(location) == 2 or location[2] == "content")
    ):
        return _path(location[:3])
    # OpenAI names the whole field, whatever is wrong in it.
    if location[:1] == ("response_format",):
        return "response_format"
    return [part for part in location if isinstance(part, str) and "<" not in part][-1]


def invalid_value(path: str, value: Any, expected: str, *, param: str | None = None) -> ApiError:
    """Returns the error of a field with a wrong value.

    Args:
      path: place of the value in the body.
      value: the wrong value, of which the message repeats the beginning.
      expected: what the value must be.
      param: OpenAI's `param`; None for the path.
    """
    return ApiError(f"{path} is {preview(value)}; it must be {expected}", param=param or path)


def check_text(value: Any, path: str) -> str:
    """Returns a value that must be text, and such that has an encoding in UTF-8.

    Raises:
      ApiError: if it is not.
    """
    try:
        return _TEXT.validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)[0]
        details["loc"] = (path,)
        raise _api_error(BodyModel, details) from None


def preview(value: Any) -> str:
    """Describes a value in a few ASCII characters; half a surrogate pair cannot be sent otherwise."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    text = ascii(value[: MAX_PREVIEW_CHARACTERS + 1] if isinstance(value, str) else value)
    # A number can have thousands of digits.
    return text if len(text) <= MAX_PREVIEW_CHARACTERS else text[: MAX_PREVIEW_CHARACTERS - 3] + "..."


def one_line(error: Exception) -> str:
    """Returns the message of an error that may repeat a client's text, in ASCII and of limited length."""
    return str(error).encode("ascii", "backslashreplace").decode()[:MAX_MESSAGE_CHARACTERS]


def _escape(name: str) -> str:
    return ascii(name)[1:-1][:MAX_PREVIEW_CHARACTERS]
