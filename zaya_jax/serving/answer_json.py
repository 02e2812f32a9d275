"""Answers as OpenAI's interface has them, whole and in chunks, for both endpoints."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from zaya_jax.inference.prompt_scores import PromptScores
from zaya_jax.inference.text import Detokenizer
from zaya_jax.serving.asked import AskedTexts
from zaya_jax.serving.choice_text import Delta
from zaya_jax.serving.token_texts import TokenTexts

LEAST_LOGPROB = -9999.0
"""What stands for a probability of 0, as at OpenAI: JSON has no infinity."""


def to_bytes(content: Any) -> bytes:
    """JSON, of ASCII: whatever a client sent and a sentence repeats, it can be sent."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """How the answer to one request is written.

    Attributes:
      asked: the request.
      model: its name.
      texts: the names of tokens.
      answer_id: of the answer.
      created: seconds since 1970.
    """

    asked: AskedTexts
    model: str
    texts: TokenTexts
    answer_id: str
    created: int

    def whole(self, deltas: Sequence[Delta], scores: Sequence[PromptScores], usage: dict) -> dict[str, Any]:
        """An answer that is sent when all of it is there.

        Args:
          deltas: all of each text.
          scores: of each prompt, where it is part of the answer.
          usage: the numbers of tokens.
        """
        write = self._chat_choice if self.asked.is_chat else self._text_choice
        choices = [write(delta, scores[self._prompt(delta)] if scores else None) for delta in deltas]
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": usage}

    def chunk(self, delta: Delta, *, is_first: bool, scores: PromptScores | None) -> dict[str, Any] | None:
        """A part of an answer; None where there is nothing to say.

        Args:
          delta: what is new of a text.
          is_first: whether it is the first of this text.
          scores: of its prompt, where that is part of the answer.
        """
        tells_tokens = (self.asked.num_top is not None or self.asked.with_routing) and delta.tokens
        has_text = delta.content or delta.thought
        if not (is_first or has_text or tells_tokens or delta.finish_reason):
            return None
        if self.asked.is_chat:
            choice, kind = self._chat_part(delta, is_first=is_first), "chat.completion.chunk"
        else:
            choice, kind = self._text_choice(delta, scores, is_first=is_first), "text_completion"
        chunk = self._head(kind) | {"choices": [choice]}
        return chunk | {"usage": None} if self.asked.has_usage else chunk

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The numbers of tokens, behind the last part."""
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return self._head(kind) | {"choices": [], "usage": usage}

    def usage(self, *, num_tokens: int, num_cached: int) -> dict[str, Any]:
        """The numbers of tokens, read and written."""
        num_read = sum(map(len, self.asked.prompts))
        return {
            "prompt_tokens": num_read,
            "completion_tokens": num_tokens,
            "total_tokens": num_read + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _prompt(self, delta: Delta) -> int:
        return delta.index // self.asked.num_choices

    def _chat_choice(self, delta: Delta, scores: PromptScores | None) -> dict[str, Any]:
        assert scores is None, "chats have no echo"
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.thought:
            message["reasoning_content"] = delta.thought
        return self._choice(delta, {"message": message}, self._chat_logprobs(delta))

    def _chat_part(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        part = {"role": "assistant", "content": ""} if is_first else {}
        if delta.thought:
            part["reasoning_content"] = delta.thought
        if delta.content:
            part["content"] = delta.content
        return self._choice(delta, {"delta": part}, self._chat_logprobs(delta))

    def _text_choice(
        self, delta: Delta, scores: PromptScores | None, *, is_first: bool = True
    ) -> dict[str, Any]:
        echo = self.asked.echoes[self._prompt(delta)] if self.asked.echoes else ""
        text = echo + delta.content if is_first else delta.content
        logprobs = None
        if self.asked.num_top is not None:
            logprobs = self._legacy_logprobs(delta, len(echo))
            if scores is not None and is_first:
                prompt = self._prompt_logprobs(self.asked.prompts[self._prompt(delta)], scores)
                logprobs = {name: prompt[name] + logprobs[name] for name in logprobs}
        return self._choice(delta, {"text": text}, logprobs)

    def _choice(self, delta: Delta, said: dict, logprobs: dict | None) -> dict[str, Any]:
        choice = {"index": delta.index, **said, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return choice | {"routing": _routing(delta)} if self.asked.with_routing else choice

    def _chat_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.asked.num_top is None:
            return None
        content = [
            self._chat_token(each.new.token, each.new.logprob)
            | {"top_logprobs": [self._chat_token(*pair) for pair in each.new.top]}
            for each in delta.tokens
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.name(token),
            "logprob": finite(logprob),
            "bytes": self.texts.utf8(token),
        }

    def _legacy_logprobs(self, delta: Delta, num_before: int) -> dict[str, list]:
        """Log-probabilities as completions have them: lists side by side."""
        return {
            "tokens": [self.texts.name(each.new.token) for each in delta.tokens],
            "token_logprobs": [finite(each.new.logprob) for each in delta.tokens],
            "top_logprobs": [self._by_name(each.new.top) for each in delta.tokens],
            "text_offset": [num_before + each.offset for each in delta.tokens],
        }

    def _prompt_logprobs(self, prompt: Sequence[int], scores: PromptScores) -> dict[str, list]:
        names = [self.texts.name(token) for token in prompt]
        top = [self._by_name(each) for each in scores.top] if self.asked.num_top else [None] * len(scores.top)
        detokenizer = Detokenizer(self.texts.tokenizer)
        lengths = [len(detokenizer.add(token)) for token in prompt]
        offsets = [0, *itertools.accumulate(lengths[:-1])]
        return {
            "tokens": names,
            "token_logprobs": [None, *map(finite, scores.logprobs)],  # nothing stands before the first
            "top_logprobs": [None, *top],
            "text_offset": offsets,
        }

    def _by_name(self, top: Sequence[tuple[int, float]]) -> dict[str, float | None] | None:
        """The likeliest tokens by their names; of two of one name the likelier counts."""
        if not self.asked.num_top:
            return None
        found: dict[str, float | None] = {}
        for token, logprob in top:
            found.setdefault(self.texts.name(token), finite(logprob))
        return found


def _routing(delta: Delta) -> dict[str, list]:
    tokens = delta.tokens
    return {
        "tokens": [each.text for each in tokens],
        "logprobs": [finite(each.new.logprob) for each in tokens],
        "experts": [_listed(each.new.experts_L) for each in tokens],
        "probabilities": [_listed(each.new.probabilities_L) for each in tokens],
    }


def _listed(values: Sequence | None) -> list | None:
    """An end token was read by nobody, and has none."""
    return None if values is None else list(values)


def finite(logprob: float) -> float | None:
    """A log-probability that JSON can hold; None for one that is no number."""
    return None if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
