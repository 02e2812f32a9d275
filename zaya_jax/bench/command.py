"""`zaya bench WHAT`: finds the measurement of a name and runs it."""

import sys
from collections.abc import Sequence

from zaya_jax.bench import (
    balancing,
    checkpoint,
    collectives_command,
    data,
    experts,
    generation,
    gradient_sum,
    kernel_times,
    loss_memory,
    memory_passes,
    optimizer_share,
    optimizers,
    products,
    rsa,
    storage,
    torch_comparison,
)
from zaya_jax.options import Parser

REPEATED = {
    "torch": torch_comparison.run,
    "balancing": balancing.run,
    "kernels": kernel_times.run,
    "optimizer-share": optimizer_share.run,
}
ONCE = {
    "data": data.run,
    "experts": experts.run,
    "gradient-sum": gradient_sum.run,
    "loss-memory": loss_memory.run,
    "optimizers": optimizers.run,
}
CHECKPOINT = "checkpoint"
WITH_OPTIONS = {
    "collectives": collectives_command.main,
    "gemm": products.main,
    "generation": generation.main,
    "hbm": memory_passes.main,
    "rsa": rsa.main,
    "storage": storage.main,
}
"""What has options of its own: `zaya bench collectives --help`. Most of it measures a machine."""
ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench` with the words behind it.

    Raises:
      ValueError: for options that do not go together.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in WITH_OPTIONS:
        WITH_OPTIONS[words[0]](words[1:])
        return
    parser = Parser(
        "bench",
        "Measures. torch: train step, forward and decode against transformers' ZayaForCausalLM. "
        "experts: memory and operations of the expert dispatch. gradient-sum: what is lost when 1,024 "
        "devices sum in bfloat16 and in float32. kernels: each Pallas "
        "kernel against XLA and others, on fresh data. loss-memory: what a step takes with all logits at "
        "once and in chunks. optimizers: loss curves of Muon and of AdamW alone. optimizer-share: what "
        "the optimiser takes of a step on 8 devices. balancing: how soon each rule evens out the "
        "experts' load; a picture. checkpoint: how long a save blocks training and when it is safe, by one "
        "writer, by Orbax and by us, in 1, 2 and 4 processes. data: tokens a second into a corpus and out of "
        "it, beside datasets.map and a memory-mapped file, and memory as the text grows. generation: tokens "
        "a second, latencies and memory beside transformers. rsa: what Markovian RSA is right in, and votes.",
        (
            "zaya bench torch",
            "zaya bench torch --rounds 10",
            "zaya bench experts",
            "zaya bench balancing",
            "zaya bench data",
            "zaya bench checkpoint --gib 8 --folder /big/disk",
        ),
    )
    parser.add_argument("what", choices=[*REPEATED, *ONCE, CHECKPOINT, *WITH_OPTIONS], help="what to measure")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"timings, the best counts; of balancing: routers, the slowest counts (default: {ROUNDS}); of "
        f"checkpoint: saves, the median counts (default: {checkpoint.ROUNDS}). {', '.join(ONCE)} have none",
    )
    parser.add_argument("--gib", type=float, help=f"of checkpoint: its size (default: {checkpoint.GIB:g})")
    parser.add_argument("--folder", help="of checkpoint: where it is written and removed (default: here)")
    options = parser.parse_args(words)
    for name in ("gib", "folder"):
        if options.what != CHECKPOINT and (value := getattr(options, name)) is not None:
            raise ValueError(f"--{name} is {value}; only {CHECKPOINT} has it, leave it out")
    if options.what in ONCE:
        if options.rounds is not None:
            raise ValueError(f"--rounds is {options.rounds}; {options.what} is done once, leave it out")
        ONCE[options.what]()
        return
    given = {name: value for name, value in vars(options).items() if name != "what" and value is not None}
    if given.get("rounds", 1) < 1:
        raise ValueError(f"--rounds is {options.rounds}; it must be at least 1")
    if options.what == CHECKPOINT:
        checkpoint.run(**given)
        return
    REPEATED[options.what](**({"rounds": ROUNDS} | given))
