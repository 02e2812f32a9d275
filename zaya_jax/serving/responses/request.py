"""Requests of OpenAI's Responses API, and their translation to chats."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from zaya_jax.serving.api.request import CompletionRequest, chat_request, read_chat_body
from zaya_jax.serving.api.request_schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    ModelName,
    StreamOptions,
    TokenLimit,
    TypedPart,
    content_tag,
    function_tool,
)
from zaya_jax.serving.api.validation import BodyModel, Text, Unsupported, validate
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.loaded_model import LoadedModel

_PARAMS = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}
"""Fields of requests by the field of the chat that they are translated to."""


class ItemText(TypedPart):
    """A part of a message, of a thought or of a tool's output."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: Text
    # Items of a response, which clients send back.
    annotations: Annotated[Any, Unsupported(([],))] = None
    logprobs: Any = None


_Texts = Annotated[
    Annotated[Text, pydantic.Tag("<text>")]
    | Annotated[list[ItemText], Field(fail_fast=True), pydantic.Tag("<parts>")],
    pydantic.Discriminator(content_tag),
]


class InputItem(TypedPart):
    """An item of the conversation: a message, a tool call or the output of one, or a thought."""

    required_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Texts = ""
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: _Texts = ""
    # Items of a response, which clients send back.
    id: Any = None
    status: Any = None
    summary: Any = None


_Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
_Input = Annotated[
    Annotated[Text, pydantic.Tag("<text>")] | Annotated[_Items, pydantic.Tag("<parts>")],
    pydantic.Discriminator(content_tag),
]


class FunctionTool(BodyModel):
    """A tool of the client. Tools that OpenAI runs itself have other types."""

    # Tools that OpenAI runs itself, such as a search of the web, have other types.
    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    # Calls that are required follow the schema in any case.
    strict: bool | None = None


class TextConfig(BodyModel):
    """The field `text`."""

    # Validated as `response_format`, whose fields the schema's name and content have one level deeper.
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: Annotated[Any, Unsupported(("medium",))] = None


class ResponsesBody(BodyModel):
    """Body of POST /v1/responses."""

    inner_models: ClassVar[Mapping[str, type[BodyModel]]] = {
        "input": InputItem,
        "content": ItemText,
        "output": ItemText,
        "tools": FunctionTool,
        "text": TextConfig,
        "stream_options": StreamOptions,
    }

    model: ModelName
    input: _Input
    instructions: Text | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    # Checked by `zaya_jax.serving.api.tool_choice`, because it depends on the tools.
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    # Notes about a request that do not change the response.
    metadata: dict[str, Any] = Field(default_factory=dict)
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # This server keeps no responses, so that a client sends the whole conversation.
    store: Annotated[Any, Unsupported((False,))] = None
    previous_response_id: Annotated[Any, Unsupported()] = None
    conversation: Annotated[Any, Unsupported()] = None
    background: Annotated[Any, Unsupported((False,))] = None
    include: Annotated[Any, Unsupported(([],))] = None
    max_tool_calls: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    reasoning: Annotated[Any, Unsupported(({},))] = None
    service_tier: Annotated[Any, Unsupported(("auto", "default"))] = None
    top_logprobs: Annotated[Any, Unsupported((0,))] = None
    truncation: Annotated[Any, Unsupported(("disabled",))] = None


def read_response(model: LoadedModel, body: bytes) -> CompletionRequest:
    """Validates the body of a response.

    Raises:
      ApiError: if the body is invalid, exceeds a limit, or the model has no chat template.
    """
    parsed = read_chat_body(ResponsesBody, model, body)
    values = {
        "messages": _messages(parsed),
        "max_tokens": parsed.max_output_tokens,
        "temperature": parsed.temperature,
        "top_p": parsed.top_p,
        "stream": parsed.stream,
        "tools": [function_tool(tool.name, tool.description, tool.parameters) for tool in parsed.tools],
        "tool_choice": _choice(parsed.tool_choice),
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "response_format": _response_format(parsed.text.format),
    }
    try:
        return chat_request(model, validate(ChatBody, values, model.name), origin=parsed)
    except ApiError as error:
        # The client knows the field by its name in this API.
        details = error.content["error"]
        details["param"] = _PARAMS.get(details["param"], details["param"])
        raise


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Returns the messages of the chat. Successive items of the assistant are one message."""
    # A thought, a text and its calls are items here, and parts of one message in a chat.
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else None
    for each in items or map(_message, body.input):  # pyright: ignore[reportArgumentType]
        is_continued = bool(messages) and each["role"] == messages[-1]["role"] == "assistant"
        if is_continued:
            messages[-1] = _joined(messages[-1], each)
        else:
            messages.append(each)
    return messages


def _message(item: InputItem) -> dict[str, Any]:
    """Returns the message of an item, or the part of an assistant's message that it is."""
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if item.type == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _text(item.content)}
    return {"role": item.role, "content": _text(item.content)}


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    # A message has no content, rather than an empty one, if it consists of calls.
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    content = (one["content"] or "") + (other["content"] or "")
    reasoning = one.get("reasoning_content", "") + other.get("reasoning_content", "")
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return message | {"content": content or None, "tool_calls": calls} if calls else message


def _text(texts: str | list[ItemText]) -> str:
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


def _choice(choice: Any) -> Any:
    """Returns the choice in the form of chats, in which the name of a function is one level deeper."""
    is_named = (
        isinstance(choice, Mapping) and set(choice) == {"type", "name"} and choice["type"] == "function"
    )
    return {"type": "function", "function": {"name": choice["name"]}} if is_named else choice


def _response_format(values: Mapping[str, Any]) -> dict[str, Any]:
    # In chats, the schema and its name are in a separate object.
    if values.get("type") != "json_schema":
        return dict(values)
    schema = {name: value for name, value in values.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
