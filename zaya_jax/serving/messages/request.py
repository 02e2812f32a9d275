"""Requests of Anthropic's Messages API, and their translation to chats."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from zaya_jax.serving.api.request import CompletionRequest, chat_request, read_chat_body
from zaya_jax.serving.api.request_schema import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    ChatBody,
    ModelName,
    StopStrings,
    TypedPart,
    content_tag,
    function_tool,
)
from zaya_jax.serving.api.validation import BodyModel, Text, Unsupported, custom_error, validate
from zaya_jax.serving.loaded_model import LoadedModel

_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
"""Types of the blocks that a message of each role may have."""
Blocks = Annotated[
    Annotated[Text, pydantic.Tag("<text>")]
    | Annotated[list["ContentBlock"], Field(fail_fast=True), pydantic.Tag("<parts>")],
    pydantic.Discriminator(content_tag),
]


class ContentBlock(TypedPart):
    """A block of a message: a text, a thought, a tool call or the result of one."""

    required_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("text",),
        "thinking": ("thinking",),
        "tool_result": ("tool_use_id",),
        "tool_use": ("id", "name", "input"),
    }

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    # A field that its type requires may have a default here, which is never used.
    text: Text = ""
    thinking: Text = ""
    id: Text | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    content: Blocks = ""
    is_error: bool = False
    # A hint for Anthropic's cache, and the signature of thoughts of its models: neither changes a response.
    cache_control: Any = None
    signature: Any = None
    citations: Annotated[Any, Unsupported(([],))] = None


class InputMessage(BodyModel):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: Blocks

    @pydantic.model_validator(mode="after")
    def _check_blocks(self) -> "InputMessage":
        # Anthropic's API refuses such a block too; a chat would place it into another turn.
        for block in blocks_of(self.content):
            if block.type not in _BLOCKS[self.role]:
                raise custom_error(f"of the {self.role} has a block of type {block.type}")
        return self


class ToolChoice(BodyModel):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class MessageTool(BodyModel):
    """A tool of the client. Tools that Anthropic runs itself have other types."""

    name: Text
    description: Text | None = None
    # Required: tools that Anthropic runs itself have none, and are refused.
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    cache_control: Any = None
    # Calls that are required follow the schema in any case.
    strict: bool | None = None


class MessagesBody(BodyModel):
    """Body of POST /v1/messages."""

    inner_models: ClassVar[Mapping[str, type[BodyModel]]] = {
        "messages": InputMessage,
        "content": ContentBlock,
        "tools": MessageTool,
        "tool_choice": ToolChoice,
    }

    model: ModelName
    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    # Required, unlike in OpenAI's APIs.
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    system: Blocks = ""
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    stop_sequences: StopStrings = Field(default_factory=list)
    stream: bool = False
    tools: Annotated[list[MessageTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = Field(default_factory=ToolChoice)
    # Whether a response shows thoughts. The model decides how long it thinks: a budget is not supported.
    thinking: Annotated[Any, Unsupported(({"type": "adaptive"}, {"type": "disabled"}))] = None
    # Notes about a request that do not change the response.
    metadata: Any = None
    cache_control: Any = None
    service_tier: Annotated[Any, Unsupported(("auto", "standard_only"))] = None
    output_config: Annotated[Any, Unsupported(({},))] = None
    container: Annotated[Any, Unsupported()] = None
    mcp_servers: Annotated[Any, Unsupported(([],))] = None


def read_message(model: LoadedModel, body: bytes) -> CompletionRequest:
    """Validates the body of a message.

    Raises:
      ApiError: if the body is invalid, exceeds a limit, or the model has no chat template.
    """
    # Everything else, such as the limits and the tools, is checked as for a chat.
    parsed = read_chat_body(MessagesBody, model, body)
    values = {
        "messages": list(_messages(parsed)),
        "max_tokens": parsed.max_tokens,
        "temperature": parsed.temperature,
        "top_p": parsed.top_p,
        "top_k": parsed.top_k,
        "stop": parsed.stop_sequences,
        "stream": parsed.stream,
        # The model continues an answer with which the conversation ends.
        "continue_final_message": parsed.messages[-1].role == "assistant",
        "tools": [
            function_tool(tool.name, tool.description, tool.input_schema) for tool in parsed.tools or ()
        ],
        "tool_choice": _choice(parsed.tool_choice),
        "parallel_tool_calls": not parsed.tool_choice.disable_parallel_tool_use,
    }
    return chat_request(model, validate(ChatBody, values, model.name), origin=parsed)


def blocks_of(content: str | list[ContentBlock]) -> list[ContentBlock]:
    """Returns a content as blocks."""
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _text(content: str | list[ContentBlock]) -> str:
    return "".join(block.text for block in blocks_of(content))


def _messages(body: MessagesBody) -> Iterator[dict[str, Any]]:
    """Yields the messages of the chat."""
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for message in body.messages:
        blocks = blocks_of(message.content)
        if message.role == "assistant":
            yield _assistant(blocks)
            continue
        # Results of tools are separate messages, and precede what the user adds to them.
        for block in blocks:
            if block.type == "tool_result":
                # Chats have no field for a failure, so that the model reads it.
                text = "Error: " * block.is_error + _text(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        if any(block.type == "text" for block in blocks):
            yield {"role": "user", "content": _text(blocks)}


def _assistant(blocks: list[ContentBlock]) -> dict[str, Any]:
    # The blocks of a message have an order; the template gives thoughts, text and calls its own.
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
    reasoning = "".join(block.thinking for block in blocks)
    content = _text(blocks) or (None if calls else "")
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _choice(choice: ToolChoice) -> Any:
    # `chat_request` checks that the name is that of a tool.
    named = {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "none": "none", "any": "required", "tool": named}[choice.type]
