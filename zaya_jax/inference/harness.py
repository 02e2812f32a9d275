"""A network as lm-eval, EleutherAI's harness, wants one: the tasks are its own, the answers ours.

Texts become tokens as lm-eval's own backend for transformers has them with what `zaya convert` writes, so
that figures compare with those of others: a context begins with the token that begins documents, and so does
a text that is scored whole, which has that token as its prefix besides. Imports `lm_eval`, an extra of ours.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.generate import generate
from zaya_jax.inference.requests import request_of, rolling_requests
from zaya_jax.inference.scoring import Scorer, score
from zaya_jax.progress import CountProgress

NEW_TOKENS = 256
"""Of an answer whose task does not say how long it may be, as lm-eval's own backends have it."""
SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}


class HarnessModel(TemplateLM):
    """A network behind the three questions that tasks ask.

    Attributes:
      scorer: the network, and the longest context.
      tokenizer: of its texts.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer):
        super().__init__()
        self.scorer, self.ours = scorer, tokenizer

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

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Tokens of a text, behind the one that begins documents unless it is there or not wanted."""
        tokens = self.ours.encode(string, specials=True)
        begins = tokens[:1] == [self.prefix_token_id] and add_special_tokens is None
        return tokens if begins or add_special_tokens is False else self.ours.borders.begin(tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **unused: Any) -> list[tuple[float, bool]]:
        """Answers requests of the form ((context, continuation), tokens of it, tokens of the other)."""
        cut = {"prefix_id": self.prefix_token_id, "length": self.max_length}
        cut_requests = [request_of(context, continuation, **cut) for _, context, continuation in requests]
        with CountProgress("loglikelihood", len(requests)) as progress:
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
        with CountProgress("loglikelihood of windows", len(every)) as progress:
            found = iter(score(self.scorer, every, advance=progress.advance))
        answers = [sum(each.log_prob for each in itertools.islice(found, len(each))) for each in windows]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on until a stop string, the end of a document, or as long as a task allows."""
        answers = [""] * len(requests)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        batches = self._batches([request.args[1] for request in requests], [len(each) for each in prompts])
        with CountProgress("generate_until", len(requests)) as progress:
            for seed, (options, numbers) in enumerate(batches):
                texts = self._generate([prompts[number] for number in numbers], options, seed=seed)
                for number, text in zip(numbers, texts, strict=True):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                progress.advance(len(numbers))
        return answers

    def _batches(self, options: Sequence[dict], lengths: Sequence[int]) -> list[tuple[dict, list[int]]]:
        """Numbers of requests that are answered together: of equal options, and of about one length."""
        groups: dict[str, list[int]] = {}
        for number, each in enumerate(options):
            groups.setdefault(json.dumps(each, sort_keys=True), []).append(number)
        size, _ = self.scorer.shape_of(())
        found = []
        for numbers in groups.values():
            # The longest first: what does not fit into memory shows at once.
            ordered = sorted(numbers, key=lambda number: -lengths[number])
            parts = (ordered[i : i + size] for i in range(0, len(ordered), size))
            found += [(options[numbers[0]], part) for part in parts]
        return found

    def _generate(self, prompts: list[list[int]], options: Mapping, *, seed: int) -> list[str]:
        """Answers to prompts, of each the end that leaves room for an answer of full length."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), NEW_TOKENS))
        until, room = given.pop("until"), given.pop("max_gen_toks")
        tokens = generate(
            self.scorer.model,
            self.scorer.variables,
            [prompt[-self._room_for_prompts(room) :] for prompt in prompts],
            max_new_tokens=room,
            eos_id=self.eot_token_id,
            seed=seed,
            is_done=_ends(until, self.ours),
            **_sampling(given),
        )
        texts = [self.ours.decode(each) for each in tokens]
        return [postprocess_generated_text(text, until, think_end_token=None) for text in texts]

    def _room_for_prompts(self, max_new_tokens: int) -> int:
        if max_new_tokens >= self.max_length:
            raise ValueError(
                f"a task asks for {max_new_tokens} new tokens, and the context is {self.max_length}; "
                "--context must be above that"
            )
        return self.max_length - max_new_tokens


def _ends(until: Sequence[str], tokenizer: Tokenizer) -> Callable[[list[int]], bool]:
    """Whether a text has ended, or has a stop string."""

    def is_done(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens)
        return tokens[-1:] == [tokenizer.eos_id] or any(stop in text for stop in until if stop)

    return is_done


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """How tokens are drawn, in our words.

    Raises:
      ValueError: for a way to generate that we do not have.
    """
    unknown = sorted(options.keys() - SAMPLING)
    if unknown:
        raise ValueError(
            f"a task generates with {', '.join(unknown)}; zaya eval knows until, max_gen_toks, "
            f"{', '.join(sorted(SAMPLING))}"
        )
    if not options["do_sample"]:
        return {"temperature": 0.0}
    # A task that samples and says no more wants the network's own probabilities.
    return {"temperature": 1.0} | {name: options[name] for name in options.keys() - {"do_sample"}}
