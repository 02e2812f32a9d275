"""`zaya train`: a run, and at its end a sample of what it learned.

It stands beside `cli.py` because it needs rooms that are below the training room.
"""

import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax.aegis.journal import SAMPLES_FILE, XLA_FOLDER, append_line, lines_of, parse_line
from zaya_jax.config import COURSE_OPTION, Config
from zaya_jax.data.loader import evaluation_batches
from zaya_jax.data.shards import Corpus
from zaya_jax.data.tokenizer import tokenizer_of
from zaya_jax.inference.generate import generate
from zaya_jax.inference.training_tasks import training_tasks
from zaya_jax.options import Parser, add_config_options, load_config
from zaya_jax.parallel import hosts
from zaya_jax.parallel.process_group import COORDINATOR, NUM_PROCESSES, PROCESS, find_process_group
from zaya_jax.platform.host_memory import reuse_host_memory
from zaya_jax.platform.xla_dump import dump_programs
from zaya_jax.train.extensions import Extensions
from zaya_jax.train.loop import TrainResult, train
from zaya_jax.train.metrics import SAMPLE_TAG, write_text
from zaya_jax.train.programs import whole_variables
from zaya_jax.train.sinks import Sinks, open_sinks
from zaya_jax.train.stopping import Stopped

SAMPLE_TEMPERATURE = 0.7
NAMES = f"{COORDINATOR}, {NUM_PROCESSES} and {PROCESS}"
PROMPT_LENGTH = 40
"""Characters of the prompt that is proposed at the end, at most."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya train` with the words behind it: a run, the rest of one, or a dry run.

    Raises:
      ValueError: for a config that cannot be, or a run folder that is not this run's.
    """
    options, overrides = _parser().parse_with_fields(argv)
    config = load_config(options.config, overrides)
    if options.devices is not None and not options.dry_run:
        raise ValueError("--devices goes with --dry-run; a run uses all devices that it finds")
    if options.dry_run:
        from zaya_jax.plan.dry_run import print_dry_run  # what only a dry run needs

        print_dry_run(config, devices=options.devices)
        return
    reuse_host_memory()
    group = find_process_group(
        os.environ,
        coordinator=options.coordinator,
        num_processes=options.num_processes,
        process=options.process_id,
    )
    if options.xla_dump is not None:
        _dump_programs(
            config, process=group.process if group is not None else 0, of_all=options.xla_dump == "all"
        )
    stopped: Stopped | None = None
    with hosts.joined(group, limit_seconds=options.wait):
        try:
            with open_sinks(config) as sinks:
                result = train(
                    config,
                    extensions=Extensions(tasks=training_tasks(config)),
                    overwrite=options.overwrite,
                    change_course=options.change_course,
                    replay_check=options.replay_check,
                    sinks=sinks,
                )
                report(result, sinks)
        except Stopped as found:
            stopped = found
            print(f"saved at step {stopped.step}; the same command goes on")
    if stopped is not None:
        sys.exit(stopped.exit_code)


def _dump_programs(config: Config, *, process: int, of_all: bool) -> None:
    folder = pathlib.Path(config.run_folder) / XLA_FOLDER
    if of_all:
        dump_programs(folder / f"process-{process}")
    elif process == 0:
        dump_programs(folder)


def config_of(words: Sequence[str]) -> Config:
    """The config of the run that `zaya train` would make with these words behind it.

    Raises:
      ValueError: for a config that cannot be.
    """
    options, overrides = _parser().parse_with_fields(words)
    return load_config(options.config, overrides)


def _parser() -> Parser:
    parser = Parser(
        "train",
        "Trains a model, or goes on with a run from its newest checkpoint.",
        (
            "zaya train",
            "zaya train --config.run_folder=runs/wide --config.model.hidden_size=256",
            'zaya train --config.tasks.names=\'["hellaswag","arc_easy"]\' --config.tasks.every=1000',
            "zaya train --config=runs/wide/config.json --replay-check=100",
            "zaya train --config=runs/wide/config.json --config.optimizer.learning_rate=1e-3 --change-course",
            "zaya train --config=configs/zaya1_8b.py --dry-run --devices=128",
        ),
    )
    add_config_options(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="throw away the run that the run folder holds"
    )
    parser.add_argument(
        COURSE_OPTION,
        action="store_true",
        help="go on with other learning rates, decays or numbers of steps than the run began with; recorded",
    )
    parser.add_argument(
        "--replay-check",
        type=int,
        metavar="N",
        help="repeat N recorded steps before the run goes on, and stop if their losses are others",
    )
    parser.add_argument(
        "--xla-dump",
        nargs="?",
        const="first",
        choices=("first", "all"),
        help=f"have XLA write its programs into {XLA_FOLDER}/ of the run: the first process, or all",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what the run would be, and stop")
    parser.add_argument("--devices", type=int, help="with --dry-run: how many share the batch")
    _add_process_options(parser)
    return parser


def _add_process_options(parser: Parser) -> None:
    """Who trains together is no part of the config: the same run goes on with other processes."""
    processes = parser.add_argument_group(
        "several processes", f"under SLURM and zaya launch they are found; else here, or in {NAMES}"
    )
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    processes.add_argument("--num-processes", type=int, help="how many train together")
    processes.add_argument("--process-id", type=int, help="which one this is, from 0")
    processes.add_argument(
        "--wait",
        type=float,
        default=hosts.LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"the longest wait for another process, {hosts.LIMIT_SECONDS:.0f} by default",
    )


def report(result: TrainResult, sinks: Sinks | None = None) -> None:
    """Prints what a run reached, a sample, and how to go on."""
    print(f"\nheld-out: {result.validation_bits_per_byte:.4f} bits/byte ({_compressors(result.corpus)})")
    if result.config.train.sample_tokens:
        sample = _sample(result)
        print(f"\nsample at temperature {SAMPLE_TEMPERATURE}:\n{sample}")
        _keep_sample(result.config, sample, sinks)
    print()
    print("\n".join(f"go on with: {command}" for command in follow_ups(result)))


def follow_ups(result: TrainResult) -> list[str]:
    """Commands for a shell that show what a run has become, the likeliest last, where the eye is."""
    folder, base = result.config.run_folder, result.config.train.init_from
    # Beside the run that it came from: what has become better or worse is the first question.
    runs = (folder,) if base is None else (base, folder)
    report_of = shlex.join(("zaya", "report", *runs))
    folder = shlex.quote(folder)
    if result.corpus.chat_template is not None:
        return [report_of, f"zaya chat {folder}"]
    # A loss of pairs of answers says little of how well texts are told; of texts there are bits a byte.
    judged = [] if result.corpus.preferences else [f"zaya eval {folder} --text FILE"]
    return [report_of, *judged, generate_command(result.config.run_folder, _held_out_text(result))]


def _keep_sample(config: Config, text: str, sinks: Sinks | None) -> None:
    """Writes a sample down beside the run's metrics, once: a finished run makes the same one again."""
    step = config.train.num_steps
    path = pathlib.Path(config.run_folder) / SAMPLES_FILE
    line = {"step": step, "temperature": SAMPLE_TEMPERATURE, "text": text}
    if hosts.is_first() and line not in map(parse_line, lines_of(path)):
        append_line(path, line)
        write_text(config.run_folder, step, SAMPLE_TAG, text)
        if sinks is not None:
            sinks.text(step, SAMPLE_TAG, text)


def generate_command(run_folder: str, text: str) -> str:
    """A command for a shell that has a run continue the first words of a text, or begin where it has none."""
    words = f"zaya generate {shlex.quote(run_folder)}"
    prompt = first_words(text)
    # With "=", for a prompt may begin with dashes.
    return f"{words} --prompt={shlex.quote(prompt)}" if prompt else words


def first_words(text: str) -> str:
    """Whole words from the first line of a text that has any that can be printed; else nothing."""
    lines = (" ".join(_printable(line).split()) for line in text.splitlines())
    line = next(filter(None, lines), "")
    if len(line) <= PROMPT_LENGTH:
        return line
    return line[: PROMPT_LENGTH + 1].rpartition(" ")[0] or line[:PROMPT_LENGTH]


def _printable(text: str) -> str:
    """With spaces for what cannot be printed, and for what a cut character decodes to."""
    return "".join(each if each.isprintable() and each != "\ufffd" else " " for each in text)


def _held_out_text(result: TrainResult) -> str:
    """The beginning of the first document that the run did not learn from."""
    data = result.config.resolved_phases[-1].config.data
    (batch,) = evaluation_batches(
        result.corpus, split="validation", sequence_length=data.sequence_length, batch_size=1, limit=1
    )
    tokens_T, segments_T = np.asarray(batch.tokens_BT)[0], np.asarray(batch.segments_BT)[0]
    return tokenizer_of(data).decode(tokens_T[segments_T == 1].tolist())


def _compressors(corpus: Corpus) -> str:
    """What general compressors make of the same files."""
    split = corpus.validation
    sizes = (("gzip -9", split.gzip_9_bytes), ("xz -9", split.xz_9_bytes))
    rates = [f"{name} {8 * size / split.text_bytes:.3f}" for name, size in sizes if size is not None]
    return f"of the same files: {', '.join(rates)}" if rates else "no compressor was tried"


def _sample(result: TrainResult) -> str:
    config: Config = result.config
    tokenizer = tokenizer_of(config.data)
    key = jax.random.fold_in(result.state.key, config.train.num_steps)
    tokens = generate(
        result.model,
        whole_variables(result.state, result.mesh),
        tokenizer.borders.begin([]),
        max_new_tokens=min(config.train.sample_tokens, config.model.max_position_embeddings - 1),
        temperature=SAMPLE_TEMPERATURE,
        seed=int(jax.random.bits(key)) >> 1,
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode(tokens)
