"""`zaya bench generation`: how fast texts come, beside transformers, and in how much memory.

Both sides have one exported network, a process each, and take turns. Nobody reads faster than the machine
multiplies, and nobody writes faster than the weights of a step come out of memory: both bounds are measured
in the same run. The cache of ZAYA1-8B is counted from the shapes that are allocated for it.

Seen on 25 November 2026, two cores of an AMD EPYC, nothing else running, 58 M parameters in float32 (jax
0.10.2, torch 2.13.0, transformers 5.23.0). Tokens a second written at batches of 1, 8 and 64: ours 457, 842
and 1,737; transformers 95, 319 and 1,193, under torch.compile 127, 364 and 1,356. Read: 4,297, 8,490 and
10,654; 2,353, 5,115 and 5,498; 3,165, 5,681 and 6,776. A prompt of 2,048, 4,096 and 8,192 tokens adds 51, 96
and 175 MiB; 114, 161 and 470. At 25, 50, 75 and 100% of what the engine can serve, a request waits 67, 92,
82 and 95 ms for its first token (of a hundred one 212, 194, 182 and 369), and 10, 15, 21 and 22 ms for each
further one.
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from zaya_jax.bench import generation_tables as tables
from zaya_jax.bench.generation_load import Load, loads
from zaya_jax.bench.generation_sides import (
    Asked,
    Times,
    our_prefill,
    ours,
    their_compiled,
    their_prefill,
    theirs,
)
from zaya_jax.bench.machine import check_outputs, this_machine, write_json
from zaya_jax.bench.measure import CEILING_FLOPS, best_seconds, ceiling_matmul
from zaya_jax.bench.memory_passes import pass_time
from zaya_jax.bench.torch_comparison import EXECUTION, MODEL, why_not_compiled
from zaya_jax.bench.turns import answers_in_turn
from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch import save_pytorch
from zaya_jax.model.cache import init_cache
from zaya_jax.model.flops import forward_flops_per_token
from zaya_jax.model.weights import count_parameters, declare, flatten_weights
from zaya_jax.model.zaya import Zaya
from zaya_jax.options import Parser

NETWORK = dataclasses.replace(MODEL, max_position_embeddings=16_384)
BATCHES, PROMPT, NEW = (1, 8, 64), 128, 32
LENGTHS = (2048, 4096, 8192)
ROUNDS = 3
PASS_BYTES = 2**28
"""Of an array that no cache holds."""
COMPILE_SECONDS = 1800.0
"""That a process may take to get ready."""
PARTS = ("speed", "prompts", "load")
FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class SideSpeed:
    """What a side does at a batch size.

    Attributes:
      batch: prompts.
      side: who.
      read: tokens of prompts a second.
      written: new tokens a second, of all rows.
      read_bound: what the machine's products allow.
      written_bound: what its memory and products allow.
      step_p50: seconds of a step that somebody looks at, the median.
      step_p99: of a hundred, all but the slowest.
    """

    batch: int
    side: str
    read: float
    written: float
    read_bound: float
    written_bound: float
    step_p50: float
    step_p99: float


@dataclasses.dataclass(frozen=True)
class PromptMemory:
    """What reading one prompt adds to a process at its highest, in bytes, by side."""

    length: int
    ours: int
    theirs: int


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench generation` with the words behind it.

    Raises:
      ValueError: when torch or transformers is not installed, or for numbers that cannot be.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{package} is not installed; the comparison needs it: pip install 'zaya_jax[test]'"
            )
    batches, lengths = (_numbers(options, name) for name in ("batches", "lengths"))
    if options.rounds < 1:
        raise ValueError(f"--rounds is {options.rounds}; it must be at least 1")
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(NETWORK):,} parameters in float32; prompts of {PROMPT} tokens, {NEW} new ones, "
        f"greedy; medians of {options.rounds} turns, each side in a process of its own"
    )
    values: dict[str, Any] = {"machine": dataclasses.asdict(this_machine()), "cache": cache_table()}
    console.print(tables.caches(values["cache"]))
    with tempfile.TemporaryDirectory() as folder:
        network = export(pathlib.Path(folder, "network"))
        for part in options.parts or PARTS:
            found = list(_measured(part, network, batches, lengths, options, console))
            values[part] = [dataclasses.asdict(each) for each in found]
            console.print(tables.TABLES[part](found))
            write_json(options.json, values)  # the parts take minutes: what is there is kept


def _measured(
    part: str,
    network: str,
    batches: Sequence[int],
    lengths: Sequence[int],
    options: argparse.Namespace,
    console: Console,
) -> "Iterator[SideSpeed | PromptMemory | Load]":
    if part == "speed":
        why_not = None if options.without_compiled else why_not_compiled() or why_not_generated(network)
        if why_not:
            console.print(why_not)
        return speeds(
            network, batches, options.rounds, with_compiled=not (options.without_compiled or why_not)
        )
    if part == "prompts":
        return prompt_memories(network, lengths)
    return loads(network)


def _numbers(options: argparse.Namespace, name: str) -> tuple[int, ...]:
    """Numbers with commas between them.

    Raises:
      ValueError: for what is none, or below 1.
    """
    text = getattr(options, name)
    numbers = text.split(",")
    if not all(each.isdecimal() and int(each) for each in numbers):
        raise ValueError(f"--{name} is {text}; it must be numbers from 1 on with commas between them")
    return tuple(map(int, numbers))


def _parser() -> Parser:
    parser = Parser(
        "bench generation",
        "Tokens a second that are read and written at several batch sizes, beside transformers (eager, and "
        "under torch.compile), latencies of tokens, the bytes of caches and long prompts, and what requests "
        "wait when many come.",
        (
            "zaya bench generation",
            "zaya bench generation --parts speed --batches=1,8 --rounds=5",
            "zaya bench generation --parts prompts load --json=generation.json",
        ),
    )
    known = ", ".join(PARTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {known}; default all")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="(default: %(default)s)")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns (default: %(default)s)")
    parser.add_argument(
        "--without-compiled",
        action="store_true",
        help="leave torch.compile out, which writes and compiles C++ for minutes a batch",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser


def export(folder: pathlib.Path) -> str:
    """Writes random weights as both sides load them."""
    model = Zaya(NETWORK, EXECUTION)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    save_pytorch(folder, model, variables, dtype="float32")
    return str(folder)


def speeds(network: str, batches: Sequence[int], rounds: int, *, with_compiled: bool) -> Iterator[SideSpeed]:
    """Of both sides at each batch size, with what the machine allows.

    Args:
      network: the folder of an exported one.
      batches: numbers of prompts.
      rounds: turns.
      with_compiled: whether transformers also runs under `torch.compile`.
    """
    makers = {"ours": ours, "transformers": theirs} | ({"compiled": their_compiled} if with_compiled else {})
    for batch in batches:
        asked = Asked(network, NETWORK.vocab_size, batch, PROMPT, NEW)
        programs = {side: functools.partial(make, asked) for side, make in makers.items()}
        turns = answers_in_turn(programs, rounds=rounds, limit=COMPILE_SECONDS)
        bounds = reading_bound(batch), writing_bound(batch)
        for side, times in turns.items():
            yield _speed(batch, side, times, bounds)


def why_not_generated(network: str) -> str | None:
    """Why transformers cannot generate under `torch.compile` here, in a sentence; None where it can."""
    asked = Asked(network, NETWORK.vocab_size, 1, PROMPT, 4)
    programs = {"generation under torch.compile": functools.partial(their_compiled, asked)}
    try:
        answers_in_turn(programs, rounds=1, limit=COMPILE_SECONDS)
    except RuntimeError as error:
        return f"torch.compile is left out: {str(error).splitlines()[0]}"
    return None


def _speed(batch: int, side: str, times: Sequence[Times], bounds: tuple[float, float]) -> SideSpeed:
    first, whole = (float(np.median([getattr(each, name) for each in times])) for name in ("first", "whole"))
    steps = [step for each in times for step in each.steps]
    p50, p99 = np.quantile(steps, (0.5, 0.99)).tolist()
    written = batch * (NEW - 1) / (whole - first)
    return SideSpeed(batch, side, batch * PROMPT / first, written, *bounds, p50, p99)


def reading_bound(batch: int) -> float:
    """Tokens of prompts a second, if nothing but useful products took time at this machine's best rate."""
    flops = math.fsum(forward_flops_per_token(NETWORK, PROMPT).values())
    # Of a prompt only the last token's logits are wanted.
    flops -= forward_flops_per_token(NETWORK, PROMPT)["head"] * (1 - 1 / PROMPT)
    del batch
    return _flops() / flops


def writing_bound(batch: int) -> float:
    """New tokens a second, if a step were nothing but its weights from memory, or its products."""
    flops = math.fsum(forward_flops_per_token(NETWORK, PROMPT + NEW).values())
    seconds = max(step_bytes(NETWORK, batch) / _bandwidth(), batch * flops / _flops())
    return batch / seconds


def step_bytes(config: ModelConfig, batch: int) -> float:
    """Bytes of weights that a step reads: of the experts those that one of its tokens goes to.

    Each goes to any of them alike; E (1 - (1 - 1/E)^B) of E are met by B tokens.
    """
    share = 1 - (1 - 1 / config.num_experts) ** batch
    sizes = {
        path: weight.size * (share if path.startswith("layers/experts/") else 1)
        for path, weight in flatten_weights(declare(config)).items()
    }
    return FLOAT32 * math.fsum(sizes.values())


@functools.cache
def _flops() -> float:
    """Operations a second of a large product."""
    return CEILING_FLOPS / best_seconds({"": ceiling_matmul()}, rounds=ROUNDS)[""]


@functools.cache
def _bandwidth() -> float:
    """Bytes a second that come out of memory."""
    return pass_time("scale", PASS_BYTES).bandwidth


def cache_table(config: ModelConfig | None = None) -> dict[str, tuple[int, int]]:
    """Bytes that a sequence of ZAYA1-8B keeps, for each token and once, by the attention that it had.

    CCA's are those of the arrays that are allocated; the others are [CCA] Table II's.
    """
    config = ModelConfig() if config is None else config
    short, long = (_cache_bytes(config, length) for length in (1024, 2048))
    token = (long - short) // 1024
    full = 2 * config.hidden_size * config.num_hidden_layers * 2  # keys and values, bfloat16
    group = config.num_attention_heads // config.num_key_value_heads
    return {
        "CCA, ZAYA1-8B": (token, short - 1024 * token),
        f"GQA, {group} query heads a key head": (full // group, 0),
        "multi-head attention": (full, 0),
    }


def _cache_bytes(config: ModelConfig, length: int) -> int:
    cache = jax.eval_shape(lambda: init_cache(config, 1, length, "bfloat16"))
    arrays = jax.tree.leaves((cache.pool, cache.state))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def prompt_memories(network: str, lengths: Sequence[int]) -> Iterator[PromptMemory]:
    """What one prompt of each length adds to a process that has the weights.

    Args:
      network: the folder of an exported one.
      lengths: tokens of the prompt.
    """
    for length in lengths:
        asked = Asked(network, NETWORK.vocab_size, 1, length, 1)
        programs = {
            "ours": functools.partial(our_prefill, asked),
            "theirs": functools.partial(their_prefill, asked),
        }
        added = answers_in_turn(programs, rounds=1, limit=COMPILE_SECONDS)
        yield PromptMemory(length, added["ours"][0], added["theirs"][0])
