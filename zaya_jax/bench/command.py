"""`zaya bench WHAT`."""

from collections.abc import Sequence

from zaya_jax.bench import balancing, experts, kernels, optimizer_share, optimizers, torch_comparison
from zaya_jax.options import Parser

BENCHMARKS = {
    "torch": torch_comparison.run,
    "balancing": balancing.run,
    "experts": experts.run,
    "kernels": kernels.run,
    "optimizers": optimizers.run,
    "optimizer-share": optimizer_share.run,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench`."""
    parser = Parser(
        "bench",
        "Measures. torch: train step, forward and decode against transformers' ZayaForCausalLM. "
        "experts: memory and operations of the expert dispatch. kernels: each Pallas "
        "kernel against XLA and others, on fresh data. optimizers: loss curves of Muon and of "
        "AdamW alone. optimizer-share: what the optimiser takes of a step on 8 devices. balancing: how soon "
        "each rule evens out the experts' load; a picture.",
        ("zaya bench torch", "zaya bench torch --rounds 10", "zaya bench experts", "zaya bench balancing"),
    )
    parser.add_argument("what", choices=BENCHMARKS, help="what to measure")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="timings, the best counts; of balancing: routers, the slowest counts",
    )
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise ValueError(f"--rounds is {options.rounds}; it must be at least 1")
    BENCHMARKS[options.what](rounds=options.rounds)
