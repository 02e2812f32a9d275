"""`zaya bench generation`: latency of requests that arrive at our engine at random times.

`zaya bench torch` compares the speed of prefill and decoding with transformers.

Measured on 26 November 2026, two cores of an AMD EPYC, otherwise idle, 58 M parameters in float32 (jax
0.10.2): at 25, 50, 75 and 100% of the engine's capacity of 7.5 requests per second, median time to first
token 88, 82, 109 and 186 ms (99th percentile 227, 249, 245 and 791 ms), time per further token 10, 13, 26 and
39 ms.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from rich.console import Console

from zaya_jax.bench.generation import output
from zaya_jax.bench.generation.load import loads, short_prompts
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.bench.torch_comparison.workload import MODEL, export
from zaya_jax.model.weights import count_parameters
from zaya_jax.options import Parser
from zaya_jax.plan.output.picture import check_outputs


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench generation` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{count_parameters(MODEL):,} parameters in float32, greedy")
    with tempfile.TemporaryDirectory() as folder:
        network = export(pathlib.Path(folder, "network"))
        rows, short = list(loads(network)), short_prompts(network)
    console.print(output.loads(rows))
    console.print(output.short_prompts(short))
    machine = dataclasses.asdict(this_machine())
    figures = {
        "load": [dataclasses.asdict(each) for each in rows],
        "short_prompts": [dataclasses.asdict(each) for each in short],
    }
    write_json(options.json, {"machine": machine} | figures)


def _parser() -> Parser:
    parser = Parser(
        "bench generation",
        "Measure the latency of requests that arrive at random times at shares of the engine's capacity, and "
        "of many short prompts at once.",
        ("zaya bench generation", "zaya bench generation --json=generation.json"),
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser
