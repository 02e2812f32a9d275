"""Responses of Anthropic's Messages API, complete and in events."""

import dataclasses
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.serving.api.blocks import BlockChange, ResponseBlock, ResponseBlocks
from zaya_jax.serving.api.choice_text import Delta
from zaya_jax.serving.api.form import ApiForm
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.api.token_texts import TokenTexts
from zaya_jax.serving.http.errors import MESSAGES_PATH
from zaya_jax.serving.messages.request import MessagesBody, read_message

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of a block's event with new characters, and the event's field with these, by kind of block."""


class MessageBuilder:
    """Builds one response.

    Attributes:
      request: the request.
    """

    def __init__(self, request: CompletionRequest, model: str, texts: TokenTexts):
        del texts
        assert isinstance(request.origin, MessagesBody), "requests of other APIs have other builders"
        self.request, self._model = request, model
        # Without the field thoughts are shown, so that a client does not lose them unknowingly.
        self._shows_thoughts = request.origin.thinking != {"type": "disabled"}
        self._id = f"msg_{secrets.token_hex(12)}"
        self._writer = ResponseBlocks()
        # Null until the text has ended, as in the first event of a stream.
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def usage(self, *, num_tokens: int, num_cached: int) -> dict[str, int]:
        """Returns the token counts; `input_tokens` excludes tokens that were found in the cache."""
        return {
            "input_tokens": sum(map(len, self.request.prompts)) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_tokens,
        }

    def complete(
        self, deltas: Sequence[Delta], scores: Sequence[PromptScores], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a complete response."""
        del scores
        # A message has one text: this API has no `n`.
        (delta,) = deltas
        # Consumed for the blocks that it leaves.
        list(self._changes(delta))
        return self._message([_content(block, block.text) for block in self._writer.blocks], usage)

    def begin(self) -> list[dict[str, Any]]:
        """Returns the first event, with an empty message."""
        # How much of the prompt is cached is known only later; the last event has the final counts.
        message = self._message([], self.usage(num_tokens=0, num_cached=0))
        return [{"type": "message_start", "message": message}]

    def events(self, delta: Delta, *, is_first: bool, scores: PromptScores | None) -> list[dict[str, Any]]:
        """Returns the events of a new part of the text."""
        del is_first, scores
        return [_event(change) for change in self._changes(delta)]

    def end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the last events, with the reason of the end and the token counts."""
        return [{"type": "message_delta", "delta": self._ending, "usage": usage}, {"type": "message_stop"}]

    def _changes(self, delta: Delta) -> Iterator[BlockChange]:
        # Anthropic distinguishes a stop string from the model's own end of turn.
        if delta.finish_reason is not None:
            reason = "stop_sequence" if delta.stop_string else _STOP_REASONS[delta.finish_reason]
            self._ending = {"stop_reason": reason, "stop_sequence": delta.stop_string}
        return self._writer.add(delta if self._shows_thoughts else dataclasses.replace(delta, reasoning=""))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, **self._ending, "usage": usage}


def _content(block: ResponseBlock, text: str) -> dict[str, Any]:
    """A content block with a text."""
    if block.kind == "reasoning":
        # The signature is required; here nobody would verify one.
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": text}
    # A call that the maximum number of tokens cut has arguments that are not JSON.
    try:
        arguments = json.loads(text) if text else {}
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}


def _event(change: BlockChange) -> dict[str, Any]:
    index = change.block.index
    if change.kind == "open":
        return {
            "type": "content_block_start", "index": index, "content_block": _content(change.block, "")
        }  # fmt: skip
    if change.kind == "close":
        return {"type": "content_block_stop", "index": index}
    # Arguments are sent as pieces of JSON, which the client joins and parses at the end of the block.
    kind, field = _DELTAS[change.block.kind]
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: change.text}}


MESSAGES_FORM = ApiForm(
    read_message, MessageBuilder, error_event=lambda error, _: error.content_of(MESSAGES_PATH)
)
"""Anthropic's Messages API."""
