"""Responses in OpenAI's format, complete and in chunks, for both endpoints."""

import dataclasses
import itertools
import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.inference.engine.text_stream import Detokenizer
from zaya_jax.inference.tool_calls.message_parser import CallPart
from zaya_jax.serving.api.choice_text import Delta, split_calls
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.api.token_texts import TokenTexts

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have. OpenAI uses the same number."""


def to_bytes(content: Any) -> bytes:
    """Encodes JSON in ASCII, so that an error message can repeat whatever text a client sent."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


@dataclasses.dataclass(frozen=True)
class ResponseBuilder:
    """Builds the JSON of one response.

    Attributes:
      request: the request.
      model: name of the model.
      texts: names and bytes of tokens.
      response_id: unique id of the response.
      created: time of the response, in seconds since 1970.
    """

    request: CompletionRequest
    model: str
    texts: TokenTexts
    response_id: str
    created: int

    def complete(
        self, deltas: Sequence[Delta], scores: Sequence[PromptScores], usage: dict
    ) -> dict[str, Any]:
        """Returns a complete response.

        Args:
          deltas: one per text, with all of the text.
          scores: scores of each prompt if the response has them; empty otherwise.
          usage: token counts, as `usage` returns them.
        """
        build = self._chat_choice if self.request.is_chat else self._text_choice
        choices = [build(delta, scores[self._prompt_of(delta)] if scores else None) for delta in deltas]
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": usage}

    def chunk(self, delta: Delta, *, is_first: bool, scores: PromptScores | None) -> dict[str, Any] | None:
        """Returns a chunk of a streamed response; None if there is nothing to send.

        Args:
          delta: the new part of a text.
          is_first: whether it is the first part of this text.
          scores: scores of its prompt if the response has them.
        """
        request = self.request
        has_tokens = (request.num_top is not None or request.with_routing) and delta.tokens
        has_text = delta.content or delta.reasoning or delta.calls
        if not (is_first or has_text or has_tokens or delta.finish_reason):
            return None
        if request.is_chat:
            choice, kind = self._chat_part(delta, is_first=is_first), "chat.completion.chunk"
        else:
            choice, kind = self._text_choice(delta, scores, is_first=is_first), "text_completion"
        chunk = self._head(kind) | {"choices": [choice]}
        # With include_usage, OpenAI's chunks have the field throughout; only the last one has counts.
        return chunk | {"usage": None} if request.includes_usage else chunk

    def begin(self) -> list[dict[str, Any]]:
        """Returns no events: the first chunk of each text has all that clients need."""
        return []

    def events(self, delta: Delta, *, is_first: bool, scores: PromptScores | None) -> list[dict[str, Any]]:
        """Returns the chunks of a new part of a text."""
        parts = split_calls(delta)
        chunks = [
            self.chunk(part, is_first=is_first and number == 0, scores=scores)
            for number, part in enumerate(parts)
        ]
        return [chunk for chunk in chunks if chunk is not None]

    def end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the chunk with the token counts, if the request includes it."""
        # As at OpenAI, the usage follows the last choice, in a chunk without choices.
        return [self.usage_chunk(usage)] if self.request.includes_usage else []

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the last chunk of a stream, with the token counts."""
        kind = "chat.completion.chunk" if self.request.is_chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": usage}

    def usage(self, *, num_tokens: int, num_cached: int) -> dict[str, Any]:
        """Returns the token counts of the response.

        Args:
          num_tokens: number of generated tokens.
          num_cached: number of prompt tokens found in the prefix cache.
        """
        num_prompt_tokens = sum(map(len, self.request.prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}

    def _prompt_of(self, delta: Delta) -> int:
        return delta.index // self.request.num_choices

    def _chat_choice(self, delta: Delta, scores: PromptScores | None) -> dict[str, Any]:
        assert scores is None, "chats have no echo"
        # OpenAI has no field for reasoning. `reasoning_content` is that of DeepSeek and vLLM.
        content = None if delta.calls and not delta.content else delta.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        # Absent without calls, as at OpenAI.
        if delta.calls:
            message["tool_calls"] = [_call(part) for part in delta.calls]
        return self._choice(delta, {"message": message}, self._chat_logprobs(delta))

    def _chat_part(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        # Clients take the role from the first chunk of a choice, as at OpenAI.
        part: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if delta.reasoning:
            part["reasoning_content"] = delta.reasoning
        if delta.content:
            part["content"] = delta.content
        if delta.calls:
            part["tool_calls"] = [{"index": each.index} | _call(each) for each in delta.calls]
        return self._choice(delta, {"delta": part}, self._chat_logprobs(delta))

    def _text_choice(
        self, delta: Delta, scores: PromptScores | None, *, is_first: bool = True
    ) -> dict[str, Any]:
        # With `echo`, the prompt is part of the text, and its tokens precede the generated ones.
        echo = self.request.echoes[self._prompt_of(delta)] if self.request.echoes else ""
        text = echo + delta.content if is_first else delta.content
        logprobs = None
        if self.request.num_top is not None:
            logprobs = self._completion_logprobs(delta, len(echo))
            if scores is not None and is_first:
                prompt = self._prompt_logprobs(self.request.prompts[self._prompt_of(delta)], scores)
                logprobs = {name: prompt[name] + logprobs[name] for name in logprobs}
        return self._choice(delta, {"text": text}, logprobs)

    def _choice(self, delta: Delta, text: dict, logprobs: dict | None) -> dict[str, Any]:
        # Fields of OpenAI that have no value here are null, because some clients require them.
        choice = {"index": delta.index, **text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return choice | {"routing": _routing(delta)} if self.request.with_routing else choice

    def _chat_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.request.num_top is None:
            return None
        content = [
            self._chat_token(each.new.token, each.new.logprob)
            | {"top_logprobs": [self._chat_token(*pair) for pair in each.new.top]}
            for each in delta.tokens
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.texts.name(token), "logprob": finite(logprob), "bytes": self.texts.utf8(token)}

    def _completion_logprobs(self, delta: Delta, first_offset: int) -> dict[str, list]:
        """Returns log-probabilities in the format of completions: parallel lists with an item per token."""
        return {
            "tokens": [self.texts.name(each.new.token) for each in delta.tokens],
            "token_logprobs": [finite(each.new.logprob) for each in delta.tokens],
            "top_logprobs": [self._by_name(each.new.top) for each in delta.tokens],
            "text_offset": [first_offset + each.offset for each in delta.tokens],
        }

    def _prompt_logprobs(self, prompt: Sequence[int], scores: PromptScores) -> dict[str, list]:
        names = [self.texts.name(token) for token in prompt]
        has_top = bool(self.request.num_top)
        top = [self._by_name(each) for each in scores.top] if has_top else [None] * len(scores.top)
        # Offsets count characters of the whole prompt: a token alone can decode to another text.
        detokenizer = Detokenizer(self.texts.tokenizer)
        lengths = [len(detokenizer.add(token)) for token in prompt]
        # The first token has no log-probability: nothing precedes it.
        return {
            "tokens": names,
            "token_logprobs": [None, *map(finite, scores.logprobs)],
            "top_logprobs": [None, *top],
            "text_offset": [0, *itertools.accumulate(lengths[:-1])],
        }

    def _by_name(self, top: Sequence[tuple[int, float]]) -> dict[str, float | None] | None:
        if not self.request.num_top:
            return None
        logprobs: dict[str, float | None] = {}
        # Two tokens can have the same name. The first one is the more likely.
        for token, logprob in top:
            logprobs.setdefault(self.texts.name(token), finite(logprob))
        return logprobs


def make_builder(request: CompletionRequest, model: str, texts: TokenTexts) -> ResponseBuilder:
    """Returns the builder of a new response, with its id and time."""
    response_id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return ResponseBuilder(request, model, texts, response_id, int(time.time()))


def _call(part: CallPart) -> dict[str, Any]:
    """A tool call, or the new part of one: only the first part has an id, a type and a name."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def _routing(delta: Delta) -> dict[str, list]:
    tokens = delta.tokens
    return {
        "tokens": [each.text for each in tokens],
        "logprobs": [finite(each.new.logprob) for each in tokens],
        "experts": [_as_list(each.new.experts_L) for each in tokens],
        "probabilities": [_as_list(each.new.probabilities_L) for each in tokens],
    }


def _as_list(values: Sequence | None) -> list | None:
    # The network never processes an end token, so that it has no experts.
    return None if values is None else list(values)


def finite(logprob: float) -> float | None:
    """Returns a log-probability that JSON can represent; None for NaN."""
    return None if math.isnan(logprob) else max(logprob, MIN_LOGPROB)
