"""`zaya bench generation`: speed of generation compared with transformers, and latency under load.

Both decoders run one exported network, each in its own process, alternately. Prefill cannot be faster than
the machine's matrix products, and decoding cannot be faster than reading the weights of each step from
memory; both bounds are measured in the same run.

Measured on 25 November 2026, two cores of an AMD EPYC, otherwise idle, 58 M parameters in float32 (jax
0.10.2, torch 2.13.0, transformers 5.23.0), at batch sizes 1, 8 and 64:

- decode, tokens/s: ours 457, 842 and 1,737; transformers 95, 319 and 1,193; torch.compile 127, 364 and 1,356.
- prefill, tokens/s: ours 4,297, 8,490 and 10,654; transformers 2,353, 5,115 and 5,498; torch.compile 3,165,
  5,681 and 6,776.
- at 25, 50, 75 and 100% of the engine's capacity: time to first token 67, 92, 82 and 95 ms (99th percentile
  212, 194, 182 and 369 ms), time per further token 10, 15, 21 and 22 ms.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from zaya_jax.bench.generation import output as tables
from zaya_jax.bench.generation.decoders import TokenTimes, Workload, ours, their_compiled, theirs
from zaya_jax.bench.generation.load import loads
from zaya_jax.bench.interleaved import results_interleaved
from zaya_jax.bench.kernels.memory_passes import pass_time
from zaya_jax.bench.measure import CEILING_FLOPS, best_seconds, ceiling_matmul
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.bench.training.torch_comparison import (
    COMPILE_SECONDS,
    EXECUTION,
    MODEL,
    require_transformers,
    why_not_run,
)
from zaya_jax.config import ModelConfig
from zaya_jax.convert.pytorch.in_memory import save_pytorch
from zaya_jax.errors import UserError
from zaya_jax.model.flops import forward_flops_per_token
from zaya_jax.model.weights import count_parameters, declare, flatten_weights
from zaya_jax.model.zaya import Zaya
from zaya_jax.options import Parser, check_at_least
from zaya_jax.plan.output.picture import check_outputs

BATCHES, PROMPT, NEW = (1, 8, 64), 128, 32
ROUNDS = 3
PASS_BYTES = 2**28
"""Size of an array that exceeds every cache."""

PARTS = ("speed", "load")
FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class SideSpeed:
    """Speed of a decoder at a batch size.

    Attributes:
      batch: number of prompts.
      side: name of the decoder.
      read: prefill speed in tokens per second.
      written: decoding speed in tokens per second, over all rows.
      read_bound: upper bound of `read` from the machine's matrix products.
      written_bound: upper bound of `written` from its memory bandwidth and matrix products.
      step_p50: median seconds per step when every token is fetched.
      step_p99: 99th percentile of the same.
    """

    batch: int
    side: str
    read: float
    written: float
    read_bound: float
    written_bound: float
    step_p50: float
    step_p99: float


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench generation` with the given command-line arguments.

    Raises:
      UserError: if torch or transformers is not installed, or an option is invalid.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json)
    require_transformers()
    check_at_least(options, rounds=1)
    batches = _numbers(options.batches)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(MODEL):,} parameters in float32; prompts of {PROMPT} tokens, {NEW} new ones, "
        f"greedy; medians of {options.rounds} rounds, each decoder in its own process"
    )
    values: dict[str, Any] = {"machine": dataclasses.asdict(this_machine())}
    with tempfile.TemporaryDirectory() as folder:
        network = export(pathlib.Path(folder, "network"))
        for part in options.parts or PARTS:
            if part == "speed":
                why_not = _why_not_compiled(network, options)
                rows = list(speeds(network, batches, options.rounds, with_compiled=why_not is None))
                console.print(tables.speeds(rows))
                if why_not:
                    console.print(why_not)
            else:
                rows = list(loads(network))
                console.print(tables.loads(rows))
            # Plain values, because the JSON file is rewritten after every part.
            values[part] = [dataclasses.asdict(each) for each in rows]
            write_json(options.json, values)  # after each part, because each takes minutes


def _why_not_compiled(network: str, options: argparse.Namespace) -> str | None:
    """Returns why transformers is not measured under `torch.compile`; None if it is."""
    if options.without_compiled:
        return "torch.compile is skipped, as requested"
    # A few tokens show whether the compiler fails. Compiling for a whole workload takes minutes.
    few = functools.partial(their_compiled, Workload(network, MODEL.vocab_size, 1, PROMPT, 4))
    return why_not_run("generation under torch.compile", few)


def _numbers(text: str) -> tuple[int, ...]:
    """Parses the batch sizes.

    Raises:
      UserError: if one is not a number, or is below 1.
    """
    numbers = text.split(",")
    # `isdecimal` rejects signs, spaces and empty parts. A batch without rows has no tokens per second, hence
    # the test for 0.
    if not all(each.isdecimal() and int(each) for each in numbers):
        raise UserError(f"--batches is {text}; it must be comma-separated numbers of at least 1")
    return tuple(map(int, numbers))


def _parser() -> Parser:
    parser = Parser(
        "bench generation",
        "Measure prefill and decoding tokens/s at several batch sizes against transformers (eager and under "
        "torch.compile), token latencies, and the latency of requests under load.",
        (
            "zaya bench generation",
            "zaya bench generation --parts speed --batches=1,8 --rounds=5",
            "zaya bench generation --parts load --json=generation.json",
        ),
    )
    # A metavar replaces the choices in the help, so the text names them.
    known = ", ".join(PARTS)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, metavar="PART", help=f"parts to run, of {known} (default: all)"
    )
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batch sizes of part speed")
    parser.add_argument("--rounds", default=ROUNDS, help="timings of part speed, whose median counts")
    parser.add_argument(
        "--without-compiled",
        action="store_true",
        help="skip torch.compile, which takes minutes per batch size",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser


def export(folder: pathlib.Path) -> str:
    """Exports random weights that both decoders can load."""
    model = Zaya(MODEL, EXECUTION)
    # The weights of the initialization serve: no text that they generate is looked at.
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    save_pytorch(folder, model, variables, dtype="float32")
    return str(folder)


def speeds(network: str, batches: Sequence[int], rounds: int, *, with_compiled: bool) -> Iterator[SideSpeed]:
    """Yields the speed of all decoders at each batch size, with the machine's bounds.

    Args:
      network: folder of an exported network.
      batches: numbers of prompts.
      rounds: number of timed calls.
      with_compiled: whether to include transformers under `torch.compile`.
    """
    makers = {"ours": ours, "transformers": theirs} | ({"compiled": their_compiled} if with_compiled else {})
    for batch in batches:
        workload = Workload(network, MODEL.vocab_size, batch, PROMPT, NEW)
        programs = {side: functools.partial(make, workload) for side, make in makers.items()}
        turns = results_interleaved(programs, rounds=rounds, limit=COMPILE_SECONDS)
        # The processes of the decoders have ended: nothing else uses the cores while the bounds are measured.
        bounds = prefill_bound(), decode_bound(batch)
        for side, times in turns.items():
            yield _speed(batch, side, times, bounds)


def _speed(batch: int, side: str, times: Sequence[TokenTimes], bounds: tuple[float, float]) -> SideSpeed:
    first, whole = (float(np.median([getattr(each, name) for each in times])) for name in ("first", "whole"))
    steps = [step for each in times for step in each.steps]
    # Steps of all rounds together: one round has too few of them for a 99th percentile.
    p50, p99 = np.quantile(steps, (0.5, 0.99)).tolist()
    # The first new token belongs to the prefill.
    written = batch * (NEW - 1) / (whole - first)
    return SideSpeed(batch, side, batch * PROMPT / first, written, *bounds, p50, p99)


def prefill_bound() -> float:
    """Upper bound of prefill tokens per second: only useful products, at this machine's best rate."""
    flops = math.fsum(forward_flops_per_token(MODEL, PROMPT).values())
    # Only the last token of a prompt needs logits.
    flops -= forward_flops_per_token(MODEL, PROMPT)["head"] * (1 - 1 / PROMPT)

    return _flops() / flops


def decode_bound(batch: int) -> float:
    """Upper bound of new tokens per second: each step only reads its weights from memory, or only computes
    products.
    """
    flops = math.fsum(forward_flops_per_token(MODEL, PROMPT + NEW).values())
    # Roofline of a decoding step: weights from memory, or the products of all rows.
    seconds = max(step_bytes(MODEL, batch) / _bandwidth(), batch * flops / _flops())
    return batch / seconds


def step_bytes(config: ModelConfig, batch: int) -> float:
    """Bytes of weights that a decoding step reads, with the experts that at least one of its tokens selects.

    With uniform routing, B tokens select E (1 - (1 - 1/E)^B) of E experts on average.
    """
    # Probability that at least one of the batch's tokens selects an expert.
    share = 1 - (1 - 1 / config.num_experts) ** batch
    sizes = {
        path: weight.size * (share if path.startswith("layers/experts/") else 1)
        for path, weight in flatten_weights(declare(config)).items()
    }
    return FLOAT32 * math.fsum(sizes.values())


# Once per process, because the speed of the machine does not depend on the batch size.
@functools.cache
def _flops() -> float:
    """Measures the FLOP/s of a large product."""
    return CEILING_FLOPS / best_seconds({"": ceiling_matmul()}, rounds=ROUNDS)[""]


@functools.cache
def _bandwidth() -> float:
    """Measures the bytes per second of memory."""
    return pass_time("scale", PASS_BYTES).bandwidth
