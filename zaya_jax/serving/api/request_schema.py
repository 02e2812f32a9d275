"""Pydantic models of request bodies: the fields of OpenAI's API, and some of vLLM's additions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from zaya_jax.inference.engine.sampling_params import MAX_TOP_LOGPROBS
from zaya_jax.serving.api.validation import BodyModel, Text, Unsupported, check_utf8, custom_error, preview

MAX_CHOICES = 128
"""Maximum `n`, and maximum number of texts that one request can generate."""
MAX_MESSAGES = 1000
MAX_NAME_CHARACTERS = 64
"""OpenAI's limit of the name of a schema."""
MAX_TOOLS = 512
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_TEMPERATURE = 100.0
MAX_TOKENS = 1 << 31
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat may fill the context."""
_RESERVED = {
    "messages": "messages",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "tools": "tools",
    "documents": None,
    "chat_template": None,
    "tokenize": None,
    "bos_token": None,
    "eos_token": None,
    "pad_token": None,
}
"""Variables of a template that `chat_template_kwargs` may not set, with the field that sets them instead."""


def _check_model(name: str, info: Any) -> str:
    # The context is the name of the served model.
    if name != info.context:
        text = f"is {preview(name)}, which does not exist; this server has {info.context!a}"
        raise custom_error(text, code="model_not_found", status=404)
    return name


ModelName = Annotated[Text, pydantic.AfterValidator(_check_model)]
"""Name of the model, which must be the served one."""


def _list_of_strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _RESERVED:
            fix = f"use the field {_RESERVED[name]}" if _RESERVED[name] else "remove it"
            raise custom_error(f"cannot set {name}; {fix}")
        check_utf8(name)
    return variables


# The first wrong item ends the validation of a list: a body can have a quarter of a million of them.
_StopString = Annotated[
    str,
    Field(min_length=1, max_length=MAX_STOP_CHARACTERS),
    pydantic.AfterValidator(check_utf8),
]
StopStrings = Annotated[
    list[_StopString],
    Field(fail_fast=True),
    Field(max_length=MAX_STOP_STRINGS),
    pydantic.BeforeValidator(_list_of_strings),
]
_Variables = Annotated[dict[str, Any], pydantic.AfterValidator(_check_variables)]
TokenLimit = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class StreamOptions(BodyModel):
    """The field `stream_options`."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, Unsupported((False,))] = None
    continuous_usage_stats: Annotated[Any, Unsupported((False,))] = None


class SchemaFormat(BodyModel):
    """The field `response_format.json_schema`."""

    name: Annotated[Text, Field(max_length=MAX_NAME_CHARACTERS)]
    description: Text | None = None
    # A JSON object. With an alias, because pydantic's models have a method of this name.
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    # OpenAI follows a schema exactly only if this is true. Here every answer follows it.
    strict: bool | None = None


class ResponseFormat(BodyModel):
    """The field `response_format`."""

    inner_models: ClassVar[Mapping[str, type[BodyModel]]] = {"json_schema": SchemaFormat}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @pydantic.field_validator("json_schema")
    @classmethod
    def _check_json_schema(cls, value: SchemaFormat | None, info: Any) -> Any:
        # `info.data` lacks a field that is invalid itself; that error is reported instead.
        if value is not None and info.data.get("type") in ("text", "json_object"):
            raise custom_error('requires the type "json_schema"')
        return value


class RequestBody(BodyModel):
    """Fields that both endpoints have."""

    inner_models: ClassVar[Mapping[str, type[BodyModel]]] = {
        "response_format": ResponseFormat,
        "stream_options": StreamOptions,
    }

    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    # As at vLLM, 0 and -1 disable it.
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = -1
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    stop: StopStrings = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # An extension of ours: the experts of each generated token.
    routing: bool = False
    skip_special_tokens: bool = True
    # Of chats at OpenAI, and of both endpoints at vLLM.
    response_format: ResponseFormat | None = None
    # Notes about a request that do not change the response, here or at OpenAI.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    # Accepted at their defaults, because many clients always send these fields. Any other value is refused:
    # ignoring it would silently change the result.
    frequency_penalty: Annotated[Any, Unsupported((0,))] = None
    presence_penalty: Annotated[Any, Unsupported((0,))] = None
    repetition_penalty: Annotated[Any, Unsupported((1,))] = None
    min_p: Annotated[Any, Unsupported((0,))] = None
    min_tokens: Annotated[Any, Unsupported((0,))] = None
    logit_bias: Annotated[Any, Unsupported(({},))] = None

    @pydantic.field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, value: StreamOptions | None, info: Any) -> Any:
        # `info.data` lacks a field that is invalid itself; that error is reported instead.
        if value is not None and info.data.get("stream") is False:
            raise custom_error("requires stream to be true")
        return value


class CompletionBody(RequestBody):
    """Body of POST /v1/completions."""

    # Text, tokens, or a list of either. Checked by `request.read_prompts`: the valid tokens depend on the
    # model, and pydantic would report an error for each form that the value does not have.
    prompt: Any = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # See the note on unsupported fields in RequestBody.
    suffix: Annotated[Any, Unsupported(("",))] = None
    best_of: Annotated[Any, Unsupported((1,))] = None

    @pydantic.field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int, info: Any) -> int:
        if value == 0 and info.data.get("echo") is False:
            raise custom_error("is 0; it must be at least 1, or 0 with echo")
        return value


class TypedPart(BodyModel):
    """An object whose required fields depend on its field `type`.

    Attributes:
      required_fields: names of the required fields, by type.
    """

    required_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    drops_unknown_nulls: ClassVar[bool] = True

    @pydantic.model_validator(mode="after")
    def _check_fields(self) -> "TypedPart":
        # Every subclass has the field `type`, with its own choices.
        kind = self.model_dump(include={"type"})["type"]
        required = self.required_fields.get(kind, ())
        if missing := [name for name in required if name not in self.model_fields_set]:
            raise custom_error(f"of type {kind} has no {missing[0]}")
        return self


class TextPart(BodyModel):
    """A part of a message's content. OpenAI has parts of other types, which this model cannot read."""

    type: Literal["text"]
    text: Text


def content_tag(value: Any) -> str:
    """Returns the tag of a content that is a text or a list of parts."""
    # Without tags, pydantic would report an error for both members of the union.
    return "<parts>" if isinstance(value, list) else "<text>"


_Content = Annotated[
    Annotated[Text, pydantic.Tag("<text>")]
    | Annotated[list[TextPart], Field(fail_fast=True), pydantic.Tag("<parts>")],
    pydantic.Discriminator(content_tag),
]


class ChatMessage(BodyModel):
    """A message of a chat."""

    inner_models: ClassVar[Mapping[str, type[BodyModel]]] = {"content": TextPart}

    role: Text
    # Missing or null in an assistant's message that consists of tool calls only.
    content: _Content | None
    name: Text | None = None
    # DeepSeek's name of an assistant's reasoning, and vLLM's newer one.
    reasoning_content: Text = ""
    reasoning: Text = ""
    # Parsed by `zaya_jax.data.chats.tool_records`, as those of records are.
    tool_calls: list[Any] | None = None
    tool_call_id: Text | None = None

    refusal: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported()] = None
    audio: Annotated[Any, Unsupported()] = None

    @classmethod
    def _complete(cls, known: dict[str, Any]) -> dict[str, Any]:
        # Without calls, a missing content is an error.
        return {"content": None} | known if known.get("tool_calls") else known

    @property
    def text(self) -> str | None:
        """The content as one text; None if there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a tool in the form of chats."""
    values = {"name": name, "description": description, "parameters": parameters}
    function = {field: value for field, value in values.items() if value is not None}
    return {"type": "function", "function": function}


class ChatBody(RequestBody):
    """Body of POST /v1/chat/completions."""

    inner_models: ClassVar[Mapping[str, type[BodyModel]]] = {
        "messages": ChatMessage,
        "response_format": ResponseFormat,
        "stream_options": StreamOptions,
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # vLLM's fields for the template.
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], pydantic.AfterValidator(_check_variables)] = Field(
        default_factory=dict
    )

    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None
    # Checked by `zaya_jax.serving.api.tool_choice`, because it depends on the tools.
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    # Older names of the fields of tools.
    function_call: Annotated[Any, Unsupported(("none", "auto"))] = None
    functions: Annotated[Any, Unsupported(([],))] = None
    modalities: Annotated[Any, Unsupported((["text"],))] = None
    audio: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported()] = None
    store: Annotated[Any, Unsupported((False,))] = None
    service_tier: Annotated[Any, Unsupported(("auto", "default"))] = None

    @pydantic.field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value and info.data.get("logprobs") is False:
            raise custom_error("requires logprobs to be true")
        return value
