"""Responses of OpenAI's Responses API, complete and in events."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.serving.api.blocks import BlockChange, ResponseBlock, ResponseBlocks
from zaya_jax.serving.api.choice_text import Delta
from zaya_jax.serving.api.form import ApiForm
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.api.token_texts import TokenTexts
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.responses.request import ResponsesBody, read_response

_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""Beginning of the names of a block's events, by its kind."""
Event = dict[str, Any]


class ItemBuilder:
    """Builds one response, whose output items are blocks.

    Attributes:
      request: the request.
    """

    def __init__(self, request: CompletionRequest, model: str, texts: TokenTexts):
        del texts
        assert isinstance(request.origin, ResponsesBody), "requests of other APIs have other builders"
        self.request, self._body, self._model = request, request.origin, model
        self._id, self._created = secrets.token_hex(12), int(time.time())
        self._writer = ResponseBlocks()
        # The last event has the number of the events before it, and the counts of all tokens.
        self._status, self._num_events, self._num_reasoning = "in_progress", 0, 0

    def usage(self, *, num_tokens: int, num_cached: int) -> dict[str, Any]:
        """Returns the token counts."""
        num_input = sum(map(len, self.request.prompts))
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_input + num_tokens,
        }

    def complete(
        self, deltas: Sequence[Delta], scores: Sequence[PromptScores], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a complete response."""
        del scores
        # Consumed for the blocks and counts that they leave.
        for delta in deltas:
            list(self._changes(delta))
        # The tokens were counted only now.
        usage["output_tokens_details"]["reasoning_tokens"] = self._num_reasoning
        return self._response(usage)

    def begin(self) -> list[Event]:
        """Returns the first events, with an empty response."""
        names = "response.created", "response.in_progress"
        return [self._event(name, response=self._response(None)) for name in names]

    def events(self, delta: Delta, *, is_first: bool, scores: PromptScores | None) -> list[Event]:
        """Returns the events of a new part of the text."""
        del is_first, scores
        return [event for change in self._changes(delta) for event in self._events_of(change)]

    def end(self, usage: dict[str, Any]) -> list[Event]:
        """Returns the last event, with the complete response."""
        # "response.completed" or "response.incomplete"; clients take the whole response from it.
        return [self._event(f"response.{self._status}", response=self._response(usage))]

    def _changes(self, delta: Delta) -> Iterator[BlockChange]:
        self._num_reasoning += sum(token.is_reasoning for token in delta.tokens)
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
        return self._writer.add(delta)

    def _event(self, name: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _events_of(self, change: BlockChange) -> Iterator[Event]:
        block, index = change.block, {"output_index": change.block.index}
        place = {"item_id": self._item_id(block), **index}
        # Texts are within a part of an item, and calls are items without parts.
        part = {} if block.kind == "call" else {"content_index": 0}
        extra = {"logprobs": []} if block.kind == "text" else {}
        name = f"response.{_NAMES[block.kind]}"
        if change.kind == "open":
            # Clients create the item from this event, and add the parts that follow to it.
            item = self._item(block, "in_progress", is_empty=True)
            yield self._event("response.output_item.added", item=item, **index)
            if part:
                yield self._event("response.content_part.added", **place, **part, part=_part(block, ""))
        elif change.kind == "append":
            yield self._event(f"{name}.delta", **place, **part, **extra, delta=change.text)
        else:
            field = "arguments" if block.kind == "call" else "text"
            # Each level ends with its whole content: the text, its part, and the item.
            yield self._event(f"{name}.done", **place, **part, **extra, **{field: block.text})
            if part:
                yield self._event(
                    "response.content_part.done", **place, **part, part=_part(block, block.text)
                )
            yield self._event(
                "response.output_item.done", item=self._item(block, self._status_of(block)), **index
            )

    def _status_of(self, block: ResponseBlock) -> str:
        # Only the last item can be cut, by the maximum number of tokens.
        is_cut = self._status == "incomplete" and block is self._writer.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _item_id(self, block: ResponseBlock) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self._id}{block.index}"

    def _item(self, block: ResponseBlock, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else block.text
        # An id of a block is unique in the conversation, because that of the response is.
        head = {"id": self._item_id(block), "status": status}
        if block.call is not None:
            names = {"call_id": block.call.id, "name": block.call.name}
            return head | {"type": "function_call", **names, "arguments": text}
        content = [] if is_empty else [_part(block, text)]
        if block.kind == "reasoning":
            return head | {"type": "reasoning", "summary": [], "content": content}
        return head | {"type": "message", "role": "assistant", "content": content}

    def _response(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        is_cut, body = self._status == "incomplete", self._body
        repeated = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature",
                    "tool_choice", "top_p")  # fmt: skip
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": [self._item(block, self._status_of(block)) for block in self._writer.blocks],
            "usage": usage,
            "store": False,
            "text": {"format": body.text.format},
            "tools": [tool.model_dump() for tool in body.tools],
            **{name: getattr(body, name) for name in repeated},
        }


def _part(block: ResponseBlock, text: str) -> dict[str, Any]:
    annotations = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": _NAMES[block.kind], "text": text, **annotations}


def _error_event(error: ApiError, number: int) -> Event:
    # OpenAI's event has the fields of an error, without the object around them.
    fields = {name: error.content["error"][name] for name in ("message", "code", "param")}
    return {"type": "error", "sequence_number": number, **fields}


RESPONSES_FORM = ApiForm(read_response, ItemBuilder, _error_event)
"""OpenAI's Responses API."""
