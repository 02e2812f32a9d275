"""A network as lm-eval, EleutherAI's harness, wants one: the tasks are its own, the answers ours.

Texts become tokens as lm-eval's own backend for transformers has them with what `zaya convert` writes, so
that figures compare with those of others: a context begins with the token that begins documents, and so does
a text that is scored whole, which has that token as its prefix besides. Imports `lm_eval`, an extra of ours.
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

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_records import Message
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.conversation import SYSTEM
from zaya_jax.inference.generate import Settings
from zaya_jax.inference.requests import request_of, rolling_requests
from zaya_jax.inference.scoring import Scorer, score
from zaya_jax.inference.sharing import PromptBatch
from zaya_jax.progress import CountProgress

NEW_TOKENS = 256
"""Of an answer whose task does not say how long it may be, as lm-eval's own backends have it."""
SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a task wants of an answer.

    Attributes:
      until: strings of which the first ends it, and is no part of it.
      max_new_tokens: the longest one.
      temperature: of the draws; 0 takes the likeliest token.
      top_k: as `generate` has it, like the last.
      top_p: of the draws.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


def wanted_of(options: Mapping[str, Any], length: int) -> Wanted:
    """What a task's `generation_kwargs` ask for.

    Args:
      options: as the task has them.
      length: tokens that the network reads at most.

    Raises:
      ValueError: for a way to generate that we do not have, or an answer that leaves no room for a question.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), NEW_TOKENS))
    until, room = tuple(given.pop("until")), given.pop("max_gen_toks")
    if unknown := sorted(given.keys() - SAMPLING):
        raise ValueError(
            f"a task generates with {', '.join(unknown)}; zaya eval knows until, max_gen_toks, "
            f"{', '.join(sorted(SAMPLING))}"
        )
    if room >= length:
        raise ValueError(
            f"a task asks for {room} new tokens, and the context is {length}; --context must be above that"
        )
    if not given["do_sample"]:
        return Wanted(until, room, 0.0, None, None)
    # A task that samples and says no more wants the network's own probabilities.
    return Wanted(until, room, float(given.get("temperature", 1.0)), given.get("top_k"), given.get("top_p"))


class HarnessModel(TemplateLM):
    """A network behind the three questions that tasks ask.

    Args:
      scorer: the network, and the longest context.
      tokenizer: of its texts.
      chat_format: how it was taught chats; None for one that was not. An answer then ends with its turn too.
      console: that shows how much is answered; None for standard output.
    """

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        chat_format: ChatFormat | None = None,
        console: Console | None = None,
    ):
        super().__init__()
        self.scorer, self.ours, self.chat_format = scorer, tokenizer, chat_format
        self._console = console

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.ours.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text of which nothing is known."""
        return self.scorer.prefix_id

    @property
    def max_length(self) -> int:
        """Tokens that the network reads at most."""
        return self.scorer.length

    @property
    def tokenizer_name(self) -> str:
        """By which lm-eval tells apart what it keeps of requests."""
        return self.ours.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template in Jinja, which lm-eval writes down."""
        return self.chat_format.template.text if chat_template and self.chat_format is not None else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, up to where the assistant goes on.

        Args:
          chat_history: turns, of "role" and "content".
          add_generation_prompt: whether its turn is yet to begin; else the last one is its own, and goes on.

        Raises:
          ValueError: as `ChatTemplate.render`.
        """
        assert self.chat_format is not None, "run_tasks has seen to it"
        messages = [Message(turn["role"], turn["content"]) for turn in chat_history]
        try:
            return self.chat_format.text(messages, goes_on=not add_generation_prompt)
        except ValueError:
            turns = [message for message in messages if message.role != SYSTEM]
            if len(turns) == len(messages):
                raise
            # Some templates know no such turn, and lm-eval's own backend leaves it out then.
            logging.getLogger("lm_eval").warning("the chat template refuses a system's turn; it is left out")
            return self.chat_format.text(turns, goes_on=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Tokens of a text, behind the one that begins documents unless it is there or not wanted."""
        tokens = self.ours.encode(string, specials=True)
        begins = tokens[:1] == [self.prefix_token_id] and add_special_tokens is None
        return tokens if begins or add_special_tokens is False else self.ours.borders.begin(tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **unused: Any) -> list[tuple[float, bool]]:
        """Answers requests of the form ((context, continuation), tokens of it, tokens of the other)."""
        cut = {"prefix_id": self.prefix_token_id, "length": self.max_length}
        cut_requests = [request_of(context, continuation, **cut) for _, context, continuation in requests]
        with CountProgress("loglikelihood", len(requests), self._console) as progress:
            found = score(self.scorer, cut_requests, advance=progress.advance)
        answers = [(each.log_prob, each.is_greedy) for each in found]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows where they are longer than the context."""
        cut = {"prefix_id": self.prefix_token_id, "length": self.max_length}
        windows = [rolling_requests(self.tok_encode(request.args[0]), **cut) for request in requests]
        every = list(itertools.chain.from_iterable(windows))
        with CountProgress("loglikelihood of windows", len(every), self._console) as progress:
            found = iter(score(self.scorer, every, advance=progress.advance))
        answers = [sum(each.log_prob for each in itertools.islice(found, len(each))) for each in windows]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on until a stop string, the end of a document, or as long as a task allows."""
        # All before the first: what we cannot do is not found out after an hour.
        wanted = [wanted_of(request.args[1], self.max_length) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        answers = [""] * len(requests)
        with CountProgress("generate_until", len(requests), self._console) as progress:
            batches = self._batches(wanted, [len(prompt) for prompt in prompts])
            works = (
                self._writing([prompts[number] for number in numbers], wanted[numbers[0]], seed=seed)
                for seed, numbers in enumerate(batches)
            )
            for numbers, texts in zip(batches, self.scorer.workers.answers(works), strict=True):
                until = list(wanted[numbers[0]].until)
                for number, written in zip(numbers, texts, strict=True):
                    text = postprocess_generated_text(written, until, think_end_token=None)
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                progress.advance(len(numbers))
        return answers

    def _batches(self, wanted: Sequence[Wanted], lengths: Sequence[int]) -> list[list[int]]:
        """Numbers of requests that are answered together: of equal wants, and prompts of about one length."""
        groups: dict[Wanted, list[int]] = {}
        for number, each in enumerate(wanted):
            groups.setdefault(each, []).append(number)
        size, _ = self.scorer.shape_of(())
        found = []
        for numbers in groups.values():
            # The longest first: what does not fit into memory shows at once.
            ordered = sorted(numbers, key=lambda number: -lengths[number])
            found += [ordered[i : i + size] for i in range(0, len(ordered), size)]
        return found

    def _writing(self, prompts: list[list[int]], wanted: Wanted, *, seed: int) -> PromptBatch:
        """Has prompts answered, of each the end that leaves room for an answer of full length."""
        room = self.max_length - wanted.max_new_tokens
        settings = Settings(
            max_new_tokens=wanted.max_new_tokens,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            # Of the batch: asked the same twice, a task that samples wants two answers.
            seed=seed,
            eos_id=self.eot_token_id if self.chat_format is None else self.chat_format.end_id,
        )
        return PromptBatch(
            [prompt[-room:] for prompt in prompts],
            settings,
            tuple(filter(None, wanted.until)),
            self.ours,
            # As an export's generation config has it: the end of a document still ends a text.
            last_id=self.eot_token_id,
        )
