"""A model in the interface of lm-eval, EleutherAI's harness: the tasks are lm-eval's, the answers ours.

Texts become tokens as in lm-eval's own backend for transformers with the folder that `zaya convert` writes,
so that results are comparable: a context begins with the token that begins documents, and so does a text that
is scored as a whole, which has that token as its prefix in addition. The module imports `lm_eval`, an
optional dependency.
"""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from rich.console import Console

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.end_tokens import text_end_ids
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.chat.messages import SYSTEM
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.evaluation.remote_scoring import PromptBatch
from zaya_jax.inference.evaluation.scoring import Scorer, score
from zaya_jax.inference.evaluation.scoring_requests import request_of, rolling_requests
from zaya_jax.progress import CountProgress

DEFAULT_NEW_TOKENS = 256
"""Maximum length of an answer if the task sets none, as in lm-eval's own backends."""
SAMPLING_FIELDS = {"do_sample", "temperature", "top_k", "top_p"}
"""Fields of `generation_kwargs` for sampling."""


def generation_params(kwargs: Mapping[str, Any], max_length: int, end_ids: tuple[int, ...]) -> SamplingParams:
    """Returns the sampling parameters of a task's `generation_kwargs`.

    Args:
      kwargs: the task's `generation_kwargs`.
      max_length: maximum number of tokens that the model reads.
      end_ids: end tokens of an answer.

    Raises:
      UserError: for an unsupported field, or an answer that leaves no tokens for the question.
    """
    # `normalize_gen_kwargs` unifies the aliases of lm-eval, such as max_new_tokens and max_gen_toks.
    fields: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), DEFAULT_NEW_TOKENS))
    # A task may list an empty string, before which no text can be cut.
    stop, max_new_tokens = tuple(filter(None, fields.pop("until"))), fields.pop("max_gen_toks")
    if unknown := sorted(fields.keys() - SAMPLING_FIELDS):
        raise UserError(
            f"a task generates with {', '.join(unknown)}; zaya eval supports until, max_gen_toks, "
            f"{', '.join(sorted(SAMPLING_FIELDS))}"
        )
    if max_new_tokens >= max_length:
        raise UserError(
            f"a task generates {max_new_tokens} new tokens, and the context is {max_length}; "
            "increase --context"
        )
    sampling: dict[str, Any] = {"stop_token_ids": end_ids, "stop": stop}
    if fields["do_sample"]:
        # The default of a task that samples is the model's own distribution.
        sampling["temperature"] = float(fields.get("temperature", 1.0))
        sampling |= {"top_k": fields.get("top_k"), "top_p": fields.get("top_p")}
    return SamplingParams(max_new_tokens=max_new_tokens, **sampling)


class HarnessModel(TemplateLM):
    """A model that answers lm-eval's three kinds of requests.

    Args:
      scorer: the model, and the maximum context.
      tokenizer: tokenizer of its texts.
      chat_format: chat format of the model, whose end tokens also end an answer; None without one.
      console: console for progress; None for standard output.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        chat_format: ChatFormat | None = None,
        console: Console | None = None,
    ):
        super().__init__()
        # `TemplateLM` has its own attribute `tokenizer`, for another kind of tokenizer.
        self.scorer, self.ours, self.chat_format = scorer, tokenizer, chat_format
        self._console = console

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.ours.eos_id

    @property
    def _end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return text_end_ids(self.ours) if self.chat_format is None else self.chat_format.end_ids

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        return self.scorer.prefix_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads."""
        return self.scorer.length

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        # lm-eval makes a file name of it.
        return self.ours.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the Jinja source of the chat template, which lm-eval records."""
        return self.chat_format.template.text if chat_template and self.chat_format is not None else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation up to where the assistant continues.

        Args:
          chat_history: turns, each with "role" and "content".
          add_generation_prompt: whether the assistant's turn begins after the conversation; otherwise the
            last turn is the assistant's, and it continues.

        Raises:
          UserError: as `ChatTemplate.render`.
        """
        assert self.chat_format is not None, "run_tasks checks this"
        messages = [Message(turn["role"], turn["content"]) for turn in chat_history]
        try:
            return self.chat_format.text(messages, continue_final_message=not add_generation_prompt)
        except ValueError:
            turns = [message for message in messages if message.role != SYSTEM]
            if len(turns) == len(messages):
                raise
            # Some templates reject a system turn. lm-eval's own backend omits the turn then; so does this
            # one.
            logging.getLogger("lm_eval").warning(
                "the chat template rejects a system turn; the turn is omitted"
            )
            return self.chat_format.text(turns, continue_final_message=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Encodes a text; it begins with the token that begins documents, unless that is not wanted."""
        tokens = self.ours.encode(string, specials=True)
        # A chat template may have written the name of the token already, at the beginning of its text.
        has_prefix = tokens[:1] == [self.prefix_token_id] and add_special_tokens is None
        return tokens if has_prefix or add_special_tokens is False else self.ours.delimiters.begin(tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **unused: Any) -> list[tuple[float, bool]]:
        """Scores requests of the form ((context, continuation), context tokens, continuation tokens)."""
        limits = {"prefix_id": self.prefix_token_id, "length": self.max_length}
        scoring = [request_of(context, continuation, **limits) for _, context, continuation in requests]
        with CountProgress("loglikelihood", len(requests), self._console) as progress:
            likelihoods = score(self.scorer, scoring, advance=progress.advance)
        answers = [(each.log_prob, each.is_greedy) for each in likelihoods]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of whole texts, in windows if they exceed the context."""
        limits = {"prefix_id": self.prefix_token_id, "length": self.max_length}
        windows = [rolling_requests(self.tok_encode(request.args[0]), **limits) for request in requests]
        # The windows of all texts together, so that batches are full.
        every = list(itertools.chain.from_iterable(windows))
        with CountProgress("loglikelihood of windows", len(every), self._console) as progress:
            likelihoods = iter(score(self.scorer, every, advance=progress.advance))
        answers = [
            sum(each.log_prob for each in itertools.islice(likelihoods, len(each))) for each in windows
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates texts up to a stop string, an end token, or the task's maximum length."""
        # Check all requests before the first is generated: an unsupported one must not fail after an hour.
        params = [generation_params(request.args[1], self.max_length, self._end_ids) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        answers = [""] * len(requests)
        with CountProgress("generate_until", len(requests), self._console) as progress:
            batches = self._batches(params, [len(prompt) for prompt in prompts])
            work = (
                self._prompt_batch([prompts[number] for number in numbers], params[numbers[0]], seed=seed)
                for seed, numbers in enumerate(batches)
            )
            for numbers, texts in zip(batches, self.scorer.workers.map(work), strict=True):
                until = list(params[numbers[0]].stop)
                for number, generated in zip(numbers, texts, strict=True):
                    # Cuts at stop strings once more, exactly as in lm-eval's own backends.
                    text = postprocess_generated_text(generated, until, think_end_token=None)
                    answers[number] = text
                    # lm-eval's optional cache of answers stores each one as soon as it exists.
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                progress.advance(len(numbers))
        return answers

    def _batches(self, params: Sequence[SamplingParams], lengths: Sequence[int]) -> list[list[int]]:
        """Groups request numbers into batches of equal parameters and similar prompt lengths."""
        groups: dict[SamplingParams, list[int]] = {}
        for number, each in enumerate(params):
            groups.setdefault(each, []).append(number)
        size, _ = self.scorer.shape_of(())
        batches = []
        for numbers in groups.values():
            # The longest first, so that what does not fit into memory fails at once.
            ordered = sorted(numbers, key=lambda number: -lengths[number])
            batches += [ordered[i : i + size] for i in range(0, len(ordered), size)]
        return batches

    def _prompt_batch(self, prompts: list[list[int]], params: SamplingParams, *, seed: int) -> PromptBatch:
        """Returns the work for a batch. A long prompt loses its beginning, so that a full answer fits."""
        max_prompt = self.max_length - params.max_new_tokens
        return PromptBatch(
            [prompt[-max_prompt:] for prompt in prompts],
            # The seed differs between batches: a task that samples the same prompt twice wants two answers.
            dataclasses.replace(params, seed=seed),
            self.ours,
        )
