"""Markovian RSA, ZAYA1's test-time compute: [ZAYA1-8B] section VI-A.

A population of N candidates thinks about a question, each with a budget of beta tokens. Of each only the
tail, its last tau tokens, goes on: a candidate of the next round is shown the question and the tails of C
candidates, chosen at random, and thinks anew. There are T such rounds behind the first. No prompt is thus
longer than the question and C x tau tokens (eq. 23), however much was thought. It is recursive
self-aggregation ([RSA]) with what [Markovian-Thinker] carries from chunk to chunk, and has both as special
cases: tau = beta, and C = 1, where each candidate goes on from its own tail.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.aggregation import Aggregate, AnswerOf, aggregate, find_answer, tail_of, vote
from zaya_jax.inference.batch_generation import batches
from zaya_jax.inference.completion import Completion, complete
from zaya_jax.inference.generate import Settings
from zaya_jax.inference.prompt_lines import PromptLine
from zaya_jax.inference.prompting import Prompt
from zaya_jax.inference.text import FinishReason
from zaya_jax.model.zaya import Zaya

PUBLISHED_THINKING, PUBLISHED_TAIL = 40_960, 4_096
"""beta and tau of the report's headline: [ZAYA1-8B] section VI-C a."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How much is thought: (N, C, T), beta and tau; the first three as published by default.

    Attributes:
      population: N, candidates of a round.
      candidates: C, whose tails a candidate of a later round is shown.
      rounds: T, of aggregation, behind the first. 0 only samples N answers.
      thinking: beta, tokens that a candidate may write.
      tail: tau, its last tokens that go on.
      answer_tokens: that a candidate of the last round may write in place of beta; None for beta.
    """

    population: int = 16
    candidates: int = 4
    rounds: int = 2
    thinking: int = PUBLISHED_THINKING
    tail: int = PUBLISHED_TAIL
    answer_tokens: int | None = None

    def __post_init__(self):
        for name in ("population", "candidates", "thinking", "tail", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}; it must be 0 (no aggregation) or above")
        if self.candidates > self.population:
            raise ValueError(
                f"candidates is {self.candidates}; it must be at most population, {self.population}: none is "
                "shown twice"
            )
        if self.tail > self.thinking:
            raise ValueError(f"tail is {self.tail}; it must be at most thinking, {self.thinking}")

    def budget(self, number: int) -> int:
        """Tokens that a candidate of a round may write, by the round's number from 0."""
        return (self.answer_tokens or self.thinking) if number == self.rounds else self.thinking


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What was thought in one go.

    Attributes:
      subset: numbers of the candidates before whose tails it was shown, in that order; none in round 0.
      seed: of its draws.
      num_prompt_tokens: that it read.
      tokens: that it wrote, with that which ended it.
      text: of these, without special tokens.
      finish_reason: "stop" where it ended by itself, "length" where its budget did.
      tail: the text of its last tokens, which the next round may be shown.
      answer: None if it gave none.
    """

    subset: tuple[int, ...]
    seed: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    tail: str
    answer: str | None


Population = tuple[Candidate, ...]
"""All candidates of a round."""


@dataclasses.dataclass(frozen=True)
class Aggregated:
    """What came of a question.

    Attributes:
      question: as it was asked.
      scheme: by which.
      rounds: all populations; the last one has the answers that count.
      chosen: number of the candidate of the last round that has the answer of most.
      votes: for each answer of the last round.
    """

    question: str
    scheme: Scheme
    rounds: tuple[Population, ...]
    chosen: int
    votes: Mapping[str, int]

    @property
    def final(self) -> Candidate:
        """The candidate that speaks for the last round."""
        return self.rounds[-1][self.chosen]

    @property
    def num_new_tokens(self) -> int:
        """All tokens that were written, D(q) of [ZAYA1-8B] eq. 24: of prompts and tails none."""
        return sum(len(candidate.tokens) for population in self.rounds for candidate in population)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinker:
    """A network that thinks by Markovian RSA.

    Attributes:
      model: the network.
      variables: its weights.
      tokenizer: of its texts.
      prompt_of: makes the tokens of a prompt's text, as `Prompting.of_text` does.
      settings: how tokens are drawn. Its seed is of everything that is drawn; its number of new tokens is
        the scheme's and not used.
      stop: strings that end a candidate.
      aggregate: makes a prompt of a question and tails.
      answer_of: finds the answer in a text. Of a text with thoughts it is given what stands behind them.
      think_end_id: the token that ends a thought; None where there is none.
      batch_size: candidates at a time, which bounds the memory and changes no text.
    """

    model: Zaya
    variables: Mapping
    tokenizer: Tokenizer
    prompt_of: Callable[[str], Prompt]
    settings: Settings
    stop: Sequence[str] = ()
    aggregate: Aggregate = aggregate
    answer_of: AnswerOf = find_answer
    think_end_id: int | None = None
    batch_size: int = 16

    def think(
        self, question: str, scheme: Scheme, *, told: Callable[[int, int], None] = lambda *_: None
    ) -> Aggregated:
        """Thinks about one question, with the seed of the settings; all else is `think_all`'s."""
        (found,) = self.think_all([question], scheme, told=told)
        return found

    def think_all(
        self,
        questions: Sequence[str],
        scheme: Scheme,
        *,
        told: Callable[[int, int], None] = lambda *_: None,
    ) -> list[Aggregated]:
        """Thinks about questions, round by round: batches have candidates of several.

        What comes of a question is what comes of it alone. The seed of the n-th is n - 1 above the settings'.

        Args:
          questions: their texts.
          scheme: how much.
          told: is called behind each batch, with the number of its round and how many candidates it had.

        Raises:
          ValueError: for what the context has no room for, before anything is written, and as `complete`.
        """
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not isinstance(self.settings.seed, int):
            raise ValueError("the seed is one for each prompt; it must be one for all that is drawn")
        for question in questions:
            self.check_room(question, scheme)
        rounds: list[list[Population]] = []
        populations: list[Population] = [()] * len(questions)
        for number in range(scheme.rounds + 1):
            # Of all that was thought a round sees the population before it and no other.
            populations = self._round(questions, scheme, number, populations, told)
            rounds.append(populations)
        found = []
        for question, *own in zip(questions, *rounds, strict=True):
            chosen, votes = vote([candidate.answer for candidate in own[-1]])
            found.append(Aggregated(question, scheme, tuple(own), chosen, votes))
        return found

    def room_taken(self, question: str, scheme: Scheme) -> int:
        """Tokens that the longest prompt may have with what is written behind it: [ZAYA1-8B] eq. 23."""
        first = len(self.prompt_of(question).tokens) + scheme.budget(0)
        if scheme.rounds == 0:
            return first
        frame = self.prompt_of(self.aggregate(question, [""] * scheme.candidates))
        later = max(scheme.budget(1), scheme.budget(scheme.rounds))
        return max(first, len(frame.tokens) + scheme.candidates * scheme.tail + later)

    def check_room(self, question: str, scheme: Scheme) -> None:
        """Refuses what the context has no room for.

        Raises:
          ValueError: with the number of tokens that there may be.
        """
        allowed = self.model.config.max_position_embeddings
        if (taken := self.room_taken(question, scheme)) > allowed:
            raise ValueError(
                f"the question, {scheme.candidates} tails of {scheme.tail:,} tokens and what is thought "
                f"behind may have {taken:,} tokens; they must not exceed model.max_position_embeddings, "
                f"{allowed:,}: think less, or carry less on"
            )

    def _round(
        self,
        questions: Sequence[str],
        scheme: Scheme,
        number: int,
        before: Sequence[Population],
        told: Callable[[int, int], None],
    ) -> list[Population]:
        """The candidates of a round, each of whom thinks anew, by question."""
        assert isinstance(self.settings.seed, int), "`think_all` refuses others"
        lines, subsets = [], []
        for place, question in enumerate(questions):
            seed = (self.settings.seed + place) % 2**32
            for each in range(scheme.population):
                subset = _subset(seed, scheme, number, each)
                shown = [before[place][other].tail for other in subset]
                prompt = self.prompt_of(self.aggregate(question, shown) if shown else question)
                seed_of_tokens = token_seed(seed, number, each)
                lines.append(PromptLine(len(lines), {}, prompt, scheme.budget(number), seed_of_tokens))
                subsets.append(subset)
        found: dict[int, Candidate] = {}
        for batch, completions in self._complete(lines):
            for line, completion in zip(batch, completions, strict=True):
                found[line.number] = self._candidate(subsets[line.number], line, completion, scheme)
            told(number, len(batch))
        size = scheme.population
        return [tuple(found[first + each] for each in range(size)) for first in range(0, len(lines), size)]

    def _complete(
        self, lines: Sequence[PromptLine]
    ) -> Iterator[tuple[Sequence[PromptLine], list[Completion]]]:
        """Continues prompts, so many at a time, of one shape each."""
        size = min(self.batch_size, len(lines))
        for batch in batches(lines, size, in_chunks=self.settings.context_devices > 1):
            # Filled up with its last prompt: a batch of another size would be another program.
            rows = [*batch, *[batch[-1]] * (size - len(batch))]
            settings = dataclasses.replace(
                self.settings,
                max_new_tokens=tuple(line.limit for line in rows),
                seed=tuple(line.seed for line in rows),
                eos_id=batch[0].prompt.end_id,
            )
            model = self.model, self.variables, self.tokenizer
            prompts = [line.prompt.tokens for line in rows]
            yield batch, complete(*model, prompts, settings, stop=self.stop)[: len(batch)]

    def _candidate(
        self, subset: tuple[int, ...], line: PromptLine, completion: Completion, scheme: Scheme
    ) -> Candidate:
        thought = list(completion.tokens)
        if thought[-1] == line.prompt.end_id:
            thought.pop()
        # A stop string is no part of what was thought; the text ends before it.
        num_cut = len(self.tokenizer.decode(thought)) - len(completion.text)
        behind = completion.text
        if self.think_end_id in thought:
            first = len(thought) - thought[::-1].index(self.think_end_id)
            behind = self.tokenizer.decode(thought[first:])
            behind = behind[: len(behind) - num_cut]
        if num_cut:
            thought = self.tokenizer.encode(completion.text)
        return Candidate(
            subset=subset,
            seed=line.seed,
            num_prompt_tokens=len(line.prompt.tokens),
            tokens=completion.tokens,
            text=completion.text,
            finish_reason=completion.finish_reason,
            tail=tail_of(thought, scheme.tail, self.tokenizer),
            answer=self.answer_of(behind),
        )


def token_seed(seed: int, number: int, candidate: int) -> int:
    """The seed of a candidate's tokens: of its round and its number there, so that no batch changes it."""
    return int(np.random.SeedSequence((seed, number, candidate)).generate_state(1)[0])


def _subset(seed: int, scheme: Scheme, number: int, candidate: int) -> tuple[int, ...]:
    """Whose tails a candidate is shown: C of N, uniformly, none twice; with C = 1 its own."""
    if number == 0:
        return ()
    if scheme.candidates == 1:
        return (candidate,)
    numbers = np.random.default_rng((seed, number, candidate, 1))
    chosen = numbers.choice(scheme.population, scheme.candidates, replace=False)
    return tuple(chosen.tolist())
