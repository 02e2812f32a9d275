"""Markovian RSA, ZAYA1's test-time compute: [ZAYA1-8B] section VI-A.

A population of N candidates thinks about a question, each with a budget of beta tokens. Only the tail of a
candidate, its last tau tokens, is carried on: a candidate of the next round sees the question and the tails
of C candidates, chosen at random, and thinks again. A prompt is thus never longer than the question and C x
tau tokens (eq. 23), however long the candidates thought. The method is recursive self-aggregation ([RSA])
with the carried state of [Markovian-Thinker]. Both are special cases: tau = beta, and C = 1, where each
candidate continues from its own tail.

The report does not define what T counts. Its (N, C, T) = (16, 4, 2) has two readings: two rounds that see
tails after the first population (48 candidates), or two populations, the first included (32). Its figure of
about 740,000 tokens per question fits both: 15,400 tokens per candidate or 23,100, of at most 40,960. Public
implementations of [RSA] differ in the same way. `RsaConfig.first_round` selects the reading. The
default is "extra": T = 0 is then plain sampling, and the compute is never below what the report may mean.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.completion import Completion
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.engine.text_stream import FinishReason
from zaya_jax.inference.line_texts import continue_lines
from zaya_jax.inference.prompt_files import PromptLine
from zaya_jax.inference.prompting import Prompt
from zaya_jax.inference.rsa.aggregation import Aggregate, AnswerOf, aggregate, find_answer, tail_of, vote
from zaya_jax.model.zaya import Zaya

PUBLISHED_THINKING, PUBLISHED_TAIL = 40_960, 4_096
"""beta and tau of the report's main result: [ZAYA1-8B] section VI-C a."""


FIRST_ROUND = ("extra", "counted")
"""Whether the first population, which sees no tails, is one of the T rounds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RsaConfig:
    """Budget of Markovian RSA: (N, C, T), beta and tau; N, C and T are the published ones by default.

    Attributes:
      population: N, number of candidates per round.
      candidates: C, number of tails that a candidate of a later round sees.
      rounds: T, number of rounds as `first_round` counts them.
      first_round: "extra": the first population is not one of the T rounds, which all see tails, and T = 0
        only samples N answers. "counted": it is the first of the T rounds, and T = 1 only samples.
      thinking: beta, maximum number of tokens of a candidate.
      tail: tau, number of last tokens that are carried on.
      answer_tokens: maximum number of tokens of a candidate of the last round; None for beta.
    """

    population: int = 16
    candidates: int = 4
    rounds: int = 2
    first_round: str = "extra"
    thinking: int = PUBLISHED_THINKING
    tail: int = PUBLISHED_TAIL
    answer_tokens: int | None = None

    def __post_init__(self):
        for name in ("population", "candidates", "thinking", "tail", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if self.first_round not in FIRST_ROUND:
            raise UserError(f"first_round is {self.first_round!r}; it must be {' or '.join(FIRST_ROUND)}")
        if self.num_aggregations < 0:
            # The number of rounds without an aggregation: 0, or 1 if the first population is counted.
            minimum = self.rounds - self.num_aggregations
            raise UserError(
                f"rounds is {self.rounds}; with first_round {self.first_round!r} it must be {minimum} (no "
                "aggregation) or above"
            )
        if self.candidates > self.population:
            raise UserError(
                f"candidates is {self.candidates}; it must be at most population, {self.population}, because "
                "no tail is shown twice"
            )
        if self.tail > self.thinking:
            raise UserError(f"tail is {self.tail}; it must be at most thinking, {self.thinking}")

    def budget(self, round_index: int) -> int:
        """Returns the maximum number of tokens of a candidate in a round, counted from 0."""
        is_last = round_index == self.num_aggregations
        return (self.answer_tokens or self.thinking) if is_last else self.thinking

    @property
    def num_aggregations(self) -> int:
        """Number of populations that see tails: all but the first."""
        return self.rounds - (self.first_round == "counted")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One attempt at a question.

    Attributes:
      subset: indices of the previous round's candidates whose tails it saw, in that order; empty in round 0.
      seed: seed of its draws.
      num_prompt_tokens: number of tokens of its prompt.
      tokens: generated tokens, the end token included.
      text: text of these tokens, without special tokens.
      finish_reason: "stop" if it ended by itself, "length" if its budget ended it.
      tail: text of its last tokens, which the next round may see.
      answer: its answer; None if there is none.
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
class RsaResult:
    """The result of a question.

    Attributes:
      question: text of the question.
      config: budget that was used.
      rounds: all populations; the answers of the last one count.
      chosen: index of the candidate of the last round that represents the majority answer.
      votes: number of votes for each answer of the last round.
    """

    question: str
    config: RsaConfig
    rounds: tuple[Population, ...]
    chosen: int
    votes: Mapping[str, int]

    @property
    def final(self) -> Candidate:
        """The candidate that represents the last round."""
        return self.rounds[-1][self.chosen]

    @property
    def num_new_tokens(self) -> int:
        """Number of generated tokens, D(q) of [ZAYA1-8B] eq. 24; prompts and tails are not counted."""
        return sum(len(candidate.tokens) for population in self.rounds for candidate in population)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinker:
    """A model that answers questions by Markovian RSA.

    Attributes:
      model: the model.
      variables: its weights.
      tokenizer: tokenizer of its texts.
      prompt_of: function that encodes a prompt, as `Prompting.of_text` does.
      params: how tokens are sampled. All seeds derive from its seed; `RsaConfig` sets the number of tokens.
      context_devices: number of devices that share the cache.
      aggregate: function that makes a prompt of a question and tails.
      answer_of: function that finds the answer in a text; of a text with thoughts it gets what follows them.
      think_end_id: token that ends a thought; None if there is none.
      batch_size: number of candidates at a time, which bounds the memory. Candidates of one seed differ
        between batch sizes by rounding only; see `zaya_jax.inference.engine.generate`.
    """

    model: Zaya
    variables: Mapping
    tokenizer: Tokenizer
    prompt_of: Callable[[str], Prompt]
    params: SamplingParams
    context_devices: int = 1
    aggregate: Aggregate = aggregate
    answer_of: AnswerOf = find_answer
    think_end_id: int | None = None
    batch_size: int = 16

    def think(
        self, question: str, config: RsaConfig, *, on_batch: Callable[[int, int], None] = lambda *_: None
    ) -> RsaResult:
        """Answers one question with the seed of the parameters; see `think_all`."""
        (result,) = self.think_all([question], config, on_batch=on_batch)
        return result

    def think_all(
        self,
        questions: Sequence[str],
        config: RsaConfig,
        *,
        on_batch: Callable[[int, int], None] = lambda *_: None,
    ) -> list[RsaResult]:
        """Answers questions, round by round; candidates of several questions are continued together.

        A question's draws are those that it has alone. The seed of question n is that of the parameters plus
        n.

        Args:
          questions: texts of the questions.
          config: budget.
          on_batch: function that is called when candidates are complete, with the round and their number.

        Raises:
          UserError: if the context is too short for the budget, before anything is generated.
        """
        if self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}; it must be at least 1")
        for question in questions:
            self.check_context(question, config)
        rounds: list[list[Population]] = []
        populations: list[Population] = [()] * len(questions)
        for round_index in range(config.num_aggregations + 1):
            # A round sees the previous population only: the process is Markovian.
            populations = self._round(questions, config, round_index, populations, on_batch)
            rounds.append(populations)
        results = []
        # From populations by round to populations by question.
        for question, *own in zip(questions, *rounds, strict=True):
            chosen, votes = vote([candidate.answer for candidate in own[-1]])
            results.append(RsaResult(question, config, tuple(own), chosen, votes))
        return results

    def max_context(self, question: str, config: RsaConfig) -> int:
        """Returns the maximum number of tokens of a prompt and its continuation: [ZAYA1-8B] eq. 23."""
        first = len(self.prompt_of(question).tokens) + config.budget(0)
        if config.num_aggregations == 0:
            return first
        # The longest later prompt: the aggregation prompt with empty tails, plus C tails of tau tokens.
        frame = self.prompt_of(self.aggregate(question, [""] * config.candidates))
        # The last round may have its own budget.
        later = max(config.budget(1), config.budget(config.num_aggregations))
        return max(first, len(frame.tokens) + config.candidates * config.tail + later)

    def check_context(self, question: str, config: RsaConfig) -> None:
        """Checks that the model's context is long enough.

        Raises:
          UserError: if it is not.
        """
        limit = self.model.config.max_position_embeddings
        if (needed := self.max_context(question, config)) > limit:
            raise UserError(
                f"the question, {config.candidates} tails of {config.tail:,} tokens and the continuation "
                f"may have {needed:,} tokens; they must not exceed model.max_position_embeddings, {limit:,}: "
                "reduce thinking, tail or candidates"
            )

    def _round(
        self,
        questions: Sequence[str],
        config: RsaConfig,
        round_index: int,
        previous: Sequence[Population],
        on_batch: Callable[[int, int], None],
    ) -> list[Population]:
        """Generates the candidates of a round; returns them by question."""
        lines, subsets = [], []
        for place, question in enumerate(questions):
            # Seeds are 32 bits wide on the device.
            seed = (self.params.seed + place) % 2**32
            for index in range(config.population):
                subset = _subset(seed, config, round_index, index)
                tails = [previous[place][other].tail for other in subset]
                prompt = self.prompt_of(self.aggregate(question, tails) if tails else question)
                seed_of_tokens = token_seed(seed, round_index, index)
                # Prompt lines as in `zaya generate --input`, which have their own limits and seeds.
                lines.append(PromptLine(len(lines), {}, prompt, config.budget(round_index), seed_of_tokens))
                subsets.append(subset)
        candidates: dict[int, Candidate] = {}
        for batch in continue_lines(
            self.model,
            self.variables,
            self.tokenizer,
            lines,
            self.params,
            batch_size=self.batch_size,
            context_devices=self.context_devices,
        ):
            for line, completion in batch:
                candidates[line.number] = self._candidate(subsets[line.number], line, completion, config)
            on_batch(round_index, len(batch))
        number = config.population
        return [
            tuple(candidates[first + index] for index in range(number))
            for first in range(0, len(lines), number)
        ]

    def _candidate(
        self, subset: tuple[int, ...], line: PromptLine, completion: Completion, config: RsaConfig
    ) -> Candidate:
        # The tail is part of a later prompt: without the end token, which would end the prompt there.
        tokens = list(completion.tokens)
        if tokens[-1] in line.prompt.end_ids:
            tokens.pop()
        # A stop string is not part of the thought; the text ends before it.
        num_cut = len(self.tokenizer.decode(tokens)) - len(completion.text)
        answer_text = completion.text
        if self.think_end_id in tokens:
            # The last end of a thought counts, as in the chat template.
            first = len(tokens) - tokens[::-1].index(self.think_end_id)
            answer_text = self.tokenizer.decode(tokens[first:])
            answer_text = answer_text[: len(answer_text) - num_cut]
        if num_cut:
            # The cut need not be at the end of a token.
            tokens = self.tokenizer.encode(completion.text)
        return Candidate(
            subset=subset,
            seed=line.seed,
            num_prompt_tokens=len(line.prompt.tokens),
            tokens=completion.tokens,
            text=completion.text,
            finish_reason=completion.finish_reason,
            tail=tail_of(tokens, config.tail, self.tokenizer),
            answer=self.answer_of(answer_text),
        )


def token_seed(seed: int, round_index: int, candidate: int) -> int:
    """Returns the seed of a candidate's tokens; it depends on round and index, and not on the batch."""
    # A hash of the three numbers, because sums of them would be the same for several candidates.
    return int(np.random.SeedSequence((seed, round_index, candidate)).generate_state(1)[0])


def _subset(seed: int, config: RsaConfig, round_index: int, candidate: int) -> tuple[int, ...]:
    """Samples the tails that a candidate sees: C of N without replacement; with C = 1 its own."""
    if round_index == 0:
        return ()
    if config.candidates == 1:
        # With C = 1 a candidate continues from its own tail ([Markovian-Thinker]).
        return (candidate,)
    # Uniform and without replacement. The seed contains round and index, so that the draw does not depend
    # on the batch.
    random = np.random.default_rng((seed, round_index, candidate, 1))
    return tuple(random.choice(config.population, config.candidates, replace=False).tolist())
