"""`zaya bench rsa`: right answers by samples and by rounds, of a tiny network that learned a task of slips.

At one budget of tokens for each candidate, cut into ever shorter thoughts: what one sample says, what most of
N samples say, and what Markovian RSA makes of populations. The task (`slips`) was made so that votes alone
must fail in the end; see there.

Seen in November 2026, two cores of an AMD EPYC, three networks (`--networks=3 --seed=1`) with 100 questions
each, so that a share has a standard error of three percent. Of all samples 37% are right; most of 1, 4, 16
and 48 samples say so in 39%, 43%, 42% and 50%. With the tokens of 16 samples, N = 16 and C = 4 it is 48%
with T = 1, 48% with the published T = 2, 51% with T = 3 and 56% with T = 5, of all candidates 38%, 40%, 40%
and 43%; with C = 1 and T = 2, 44% and 37%. The published T helps less here than more rounds do.
"""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.bench import slips
from zaya_jax.bench.machine import check_outputs, this_machine, write_json
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.inference.aggregation import answer_by_pattern, vote
from zaya_jax.inference.generate import Settings
from zaya_jax.inference.markovian_rsa import Aggregated, Scheme, Thinker
from zaya_jax.inference.prompting import Prompt
from zaya_jax.model.zaya import Zaya
from zaya_jax.options import Parser
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.plan.picture import new_figure
from zaya_jax.progress import CountProgress
from zaya_jax.tables import name_column, number_column
from zaya_jax.train.programs import compiled_step
from zaya_jax.train.state import abstract_state, init_state, make_setup, shardings

MODEL = ModelConfig(
    vocab_size=264,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=128,
    num_experts=4,
    router_hidden_size=16,
    rope_theta=10_000.0,
    initializer_range=0.05,
    max_position_embeddings=128,
)
BATCH = 64
NUM_STEPS, NUM_QUESTIONS, POPULATION = 400, 100, 16
SAMPLES = (1, 2, 4, 8, 16, 48)
"""Of which most say something; the last is as many as three rounds have candidates."""
ROUNDS = (1, 2, 3, 5)
"""Divisors of the number of digits, less one."""
DONE = slips.STEP_TOKENS * slips.NUM_DIGITS
"""Tokens of a whole thought."""
SHARES = "mean", "voted", "tokens"
"""What `Accuracy` has of a way."""


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """What a way of asking is right in.

    Attributes:
      way: in words.
      mean: share of right answers among all candidates of the last round.
      voted: share of questions of which most of them give the right answer.
      tokens: that were written for a question.
    """

    way: str
    mean: float
    voted: float
    tokens: float


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench rsa` with the words behind it.

    Raises:
      ValueError: for numbers that cannot be.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json, picture=options.picture)
    for name in ("questions", "steps", "networks"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    console = Console(soft_wrap=True, highlight=False)
    each = []
    for seed in range(options.seed, options.seed + options.networks):
        start = time.monotonic()
        variables = train(options.steps, seed=seed)
        console.print(f"seed {seed}: {options.steps} steps of training took {time.monotonic() - start:.0f} s")
        each.append(measure(variables, options.questions, seed=seed))
    found = together(each)
    console.print(table(found, options.questions * options.networks))
    values = {
        "machine": dataclasses.asdict(this_machine()),
        "questions": options.questions,
        "seeds": list(range(options.seed, options.seed + options.networks)),
        "of_each_seed": [[dataclasses.asdict(way) for way in ways] for ways in each],
    }
    write_json(options.json, values | {"ways": [dataclasses.asdict(way) for way in found]})
    if options.picture is not None:
        draw(pathlib.Path(options.picture), found, options.questions * options.networks)


def _parser() -> Parser:
    parser = Parser(
        "bench rsa",
        "Trains a tiny network on running sums whose steps slip, and counts right answers: of one sample, of "
        "most of N, and of Markovian RSA by rounds.",
        ("zaya bench rsa", "zaya bench rsa --networks=3 --json=rsa.json --picture=rsa.png"),
    )
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of training (default: %(default)s)")
    parser.add_argument(
        "--networks",
        type=int,
        default=1,
        metavar="N",
        help="that are trained and asked, each with its own seed and questions (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all shares")
    parser.add_argument("--picture", metavar="FILE", help="draw shares by tokens, as PNG, SVG or PDF")
    return parser


def train(num_steps: int, *, seed: int) -> Mapping:
    """The weights of a network that has learned to think with slips, and to go on from others' thoughts."""
    config = Config(
        model=MODEL,
        data=DataConfig(sequence_length=slips.LENGTH, batch_size=BATCH),
        optimizer=OptimizerConfig(learning_rate=1e-2, final_learning_rate=1e-4, warmup_steps=20),
        train=TrainConfig(num_steps=num_steps, update_norms=False, seed=seed),
        execution=ExecutionConfig(dtype="float32"),
    )
    setup, mesh = make_setup(config), data_mesh(jax.devices()[:1])
    empty = abstract_state(config, setup, mesh)
    step = compiled_step(empty, setup=setup, mesh=mesh)
    state = jax.jit(functools.partial(init_state, config, setup), out_shardings=shardings(empty, mesh))()
    numbers = np.random.default_rng((seed, 0))
    with CountProgress("steps", num_steps) as progress:
        for _ in range(num_steps):
            state, _ = step(state, slips.make_batch(numbers, BATCH))
            progress.advance(1)
    return jax.device_get(state.variables)


def make_thinker(variables: Mapping, *, seed: int) -> Thinker:
    """The network as one that thinks."""
    return Thinker(
        model=Zaya(MODEL, ExecutionConfig(dtype="float32")),
        variables=variables,
        tokenizer=slips.BYTES,
        prompt_of=lambda text: Prompt(slips.prompt_tokens(text), slips.BYTES.eos_id),
        settings=Settings(max_new_tokens=1, temperature=1.0, seed=seed),
        aggregate=slips.prompt_text,
        answer_of=answer_by_pattern(slips.ANSWER_PATTERN),
        batch_size=BATCH,
    )


def scheme_of(rounds: int, *, population: int = POPULATION, candidates: int = slips.MOST_TAILS) -> Scheme:
    """A whole thought cut into as many parts as there are rounds, of which the last also ends."""
    part = DONE // (rounds + 1)
    return Scheme(
        population=population,
        candidates=min(candidates, population),
        rounds=rounds,
        thinking=part,
        tail=slips.STEP_TOKENS,
        answer_tokens=part + 1,
    )


def measure(variables: Mapping, num_questions: int, *, seed: int) -> list[Accuracy]:
    """Right answers of all ways, to the same questions.

    Args:
      variables: of the network.
      num_questions: that each way is asked.
      seed: of questions and draws.
    """
    numbers = np.random.default_rng((seed, 1))
    questions = [slips.make_question(numbers) for _ in range(num_questions)]
    ways = {0: scheme_of(0, population=max(SAMPLES))}
    sampled = _ask(variables, questions, ways[0], seed)
    found = [
        _accuracy(f"most of {number} samples" if number > 1 else "one sample", sampled, slice(number))
        for number in SAMPLES
    ]
    for rounds in ROUNDS:
        asked = _ask(variables, questions, scheme_of(rounds), seed)
        found.append(_accuracy(f"N={POPULATION}, C={slips.MOST_TAILS}, T={rounds}", asked))
    for candidates, population in ((1, POPULATION), (4, 8), (4, 4)):
        scheme = scheme_of(2, population=population, candidates=candidates)
        asked = _ask(variables, questions, scheme, seed)
        found.append(_accuracy(f"N={population}, C={candidates}, T=2", asked))
    return found


def together(networks: Sequence[Sequence[Accuracy]]) -> list[Accuracy]:
    """Of several networks, each asked as many questions, the shares of all questions."""
    return [
        Accuracy(ways[0].way, *(_mean(getattr(each, name) for each in ways) for name in SHARES))
        for ways in zip(*networks, strict=True)
    ]


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _ask(variables: Mapping, questions: Sequence[str], scheme: Scheme, seed: int) -> list[Aggregated]:
    return make_thinker(variables, seed=seed).think_all(questions, scheme)


def _accuracy(way: str, asked: Sequence[Aggregated], some: slice = slice(None)) -> Accuracy:
    """Of some candidates of the last round; all before them count as read."""
    means, votes, tokens = [], [], []
    for each in asked:
        right, last = slips.right_answer(each.question), each.rounds[-1][some]
        answers = [candidate.answer for candidate in last]
        means.append(np.mean([answer == right for answer in answers]))
        votes.append(answers[vote(answers)[0]] == right)
        tokens.append(sum(len(c.tokens) for population in (*each.rounds[:-1], last) for c in population))
    return Accuracy(way, *(float(np.mean(values)) for values in (means, votes, tokens)))


def table(found: Sequence[Accuracy], num_questions: int) -> Table:
    """Shares of right answers, and tokens, by ways of asking."""
    title = (
        f"right answers to {num_questions} sums of {slips.NUM_DIGITS} digits, {slips.SLIP:.0%} of steps slip"
    )
    columns = map(number_column, ("of all", "of most", "±", "tokens"))
    rows = Table(name_column("asked"), *columns, title=title)
    for each in found:
        error = standard_error(each.voted, num_questions)
        shares = (f"{share:.1%}" for share in (each.mean, each.voted, error))
        rows.add_row(each.way, *shares, f"{each.tokens:,.0f}")
    return rows


def standard_error(share: float, number: int) -> float:
    """Of a share of so many questions, each of which is right or not."""
    return math.sqrt(share * (1 - share) / number)


def draw(file: pathlib.Path, found: Sequence[Accuracy], num_questions: int) -> None:
    """Writes a picture: shares of right answers by the tokens that a question was given.

    Raises:
      ValueError: if matplotlib is missing.
    """
    figure = new_figure()
    figure.suptitle(f"{num_questions} sums of {slips.NUM_DIGITS} digits, {slips.SLIP:.0%} of steps slip")
    by_tokens, by_rounds = figure.subplots(1, 2, sharey=True)
    samples, rounds = found[: len(SAMPLES)], found[len(SAMPLES) : len(SAMPLES) + len(ROUNDS)]
    # As many samples as a population has are its rounds without one, at the same number of tokens.
    rounds = [samples[SAMPLES.index(POPULATION)], *rounds]
    panels = (
        (by_tokens, samples, [each.tokens for each in samples], "samples"),
        (by_rounds, rounds, [0, *ROUNDS], f"population of {POPULATION}"),
    )
    for axes, ways, places, name in panels:
        errors = [standard_error(each.voted, num_questions) for each in ways]
        votes = [each.voted for each in ways]
        axes.errorbar(places, votes, errors, marker="o", capsize=3, label=f"most of the {name}")
        axes.plot(places, [each.mean for each in ways], marker=".", ls=":", label=f"all of the {name}")
        axes.legend()
    by_tokens.set_xscale("log")
    by_tokens.set(xlabel="tokens written for a question", ylabel="right answers", ylim=(0, 1))
    by_tokens.set_title("votes of samples")
    by_rounds.set(xlabel="rounds, T", title=f"Markovian RSA at {rounds[0].tokens:,.0f} tokens")
    figure.savefig(file, dpi=120)
