"""`zaya train`: trains a model, and prints a generated sample at the end.

It combines training with packages that import it: the watchdog, lm-eval tasks and inference.
"""

import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np

from zaya_jax.aegis.watch.fault_injection import VARIABLE as FAULT_VARIABLE
from zaya_jax.aegis.watch.fault_injection import FaultInjection, parse_faults, place_proxy
from zaya_jax.aegis.watch.watchdog import Watchdog
from zaya_jax.config import COURSE_OPTION, Config
from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.tokenizers.tokenizer import tokenizer_of
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.generate import generate
from zaya_jax.inference.evaluation.training_tasks import training_tasks
from zaya_jax.options import Parser, add_config_options, check_at_least, load_config
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import COORDINATOR, NUM_PROCESSES, PROCESS, find_process_group
from zaya_jax.platform.garbage_collection import rare_collection
from zaya_jax.platform.host_memory import reuse_host_memory
from zaya_jax.platform.program_cache import cached_programs
from zaya_jax.platform.shell import zaya_command
from zaya_jax.platform.xla_dump import dump_programs
from zaya_jax.progress import working
from zaya_jax.run_folder.events import append_line, lines_of, parse_line
from zaya_jax.run_folder.names import SAMPLES_FILE, XLA_FOLDER
from zaya_jax.train.compiled_programs import whole_variables
from zaya_jax.train.derived_config import with_schedule
from zaya_jax.train.hooks.evaluation import EvaluationTasks
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.hooks.trackers import Trackers, open_trackers
from zaya_jax.train.metrics.files import SAMPLE_TAG, write_text
from zaya_jax.train.stop_request import Stopped
from zaya_jax.train.trainer import TrainResult, train

SAMPLE_TEMPERATURE = 0.7
"""Temperature of the sample. No token is excluded: without unlikely ones a small network repeats itself."""
CODE_PROMPT = "def get(self, name, default=None):"
"""Prompt for a model that was trained on Python's standard library."""
NAMES = f"{COORDINATOR}, {NUM_PROCESSES} and {PROCESS}"
README = "README.md"
"""A text for the proposed `zaya eval` command, which most working folders have."""
PROMPT_LENGTH = 40
"""Maximum number of characters of the prompt that is proposed at the end."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya train` with these arguments: trains, resumes, or prints a dry run.

    Raises:
      UserError: for an invalid config, or a run folder of another run.
    """
    options, overrides = _parser().parse_with_fields(argv)
    check_at_least(options, devices=1)
    config = load_config(options.config, overrides)
    if options.dry_run:
        _print_dry_run(config, options.devices)
        return
    if options.devices is not None:
        raise UserError("--devices goes with --dry-run; a run uses all devices that it finds")
    # Before JAX is first used, because threads choose their arena of memory when they start.
    reuse_host_memory()
    group = find_process_group(
        os.environ,
        coordinator=options.coordinator,
        num_processes=options.num_processes,
        process=options.process_id,
    )
    # Before the backend of jax starts, which reads the XLA flags once.
    if options.xla_dump is not None:
        _dump_programs(
            config, process=group.process if group is not None else 0, of_all=options.xla_dump == "all"
        )
    # Read here and not from the config: a run that is resumed without them is the same run.
    faults = parse_faults(os.environ.get(FAULT_VARIABLE, ""))
    group, proxy = place_proxy(faults, group)
    # The exit code is set after the processes have left the group together.
    stopped: Stopped | None = None
    with (
        contextlib.ExitStack() as start,
        hosts.joined(group, limit_seconds=options.wait, collective_seconds=hosts.WATCHED_SECONDS),
    ):
        start.enter_context(rare_collection())
        # Processes of a run share programs through jax's own cache, which only the first one writes.
        if group is None:
            start.enter_context(cached_programs())
        try:
            # The trackers stay open until the sample is logged.
            with open_trackers(config) as trackers:
                result = train(
                    config,
                    hooks=[
                        *_hooks(config, FaultInjection(faults, config.run_folder, hosts.process(), proxy)),
                        EndOfStart(start.close),
                    ],
                    overwrite=options.overwrite,
                    change_course=options.change_course,
                    replay_check=options.replay_check,
                    trackers=trackers,
                )
                report(result, trackers)
        except Stopped as error:
            stopped = error
            print(f"saved at step {stopped.step}; run the same command again to resume")
    if stopped is not None:
        sys.exit(stopped.exit_code)


def _print_dry_run(config: Config, devices: int | None) -> None:
    from zaya_jax.plan.dry_run import print_dry_run  # only a dry run needs it

    # A dry run builds nothing: without its corpus, a run has the steps of its config.
    config = with_schedule(config) if pathlib.Path(config.data.corpus).is_dir() else config
    print_dry_run(config, devices=devices)


class EndOfStart(Hook):
    """Calls a function at the end of this process's first step.

    Args:
      end: function that may be called any number of times.
    """

    def __init__(self, end: Callable[[], None]):
        self._end = end

    def on_step_done(self, context: StepContext) -> None:
        """Calls the function; after the first time it does nothing."""
        del context
        self._end()


def _hooks(config: Config, injection: FaultInjection) -> list[Hook]:
    """Returns the hooks that other packages add to a run: faults, the watchdog and lm-eval tasks."""
    hooks: list[Hook] = [injection, Watchdog()]
    score = training_tasks(config)
    return hooks if score is None else [*hooks, EvaluationTasks(score)]


def _dump_programs(config: Config, *, process: int, of_all: bool) -> None:
    folder = pathlib.Path(config.run_folder) / XLA_FOLDER
    if of_all:
        dump_programs(folder / f"process-{process}")
    # All processes compile the same programs, so that one copy is enough.
    elif process == 0:
        dump_programs(folder)


def config_of(words: Sequence[str]) -> Config:
    """Returns the config of `zaya train` with these arguments.

    Raises:
      UserError: for an invalid config.
    """
    options, overrides = _parser().parse_with_fields(words)
    return load_config(options.config, overrides)


def _parser() -> Parser:
    parser = Parser(
        "train",
        "Train a model, or resume a run from its newest checkpoint.",
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
        "--overwrite", action="store_true", help="remove the run that the run folder contains"
    )
    parser.add_argument(
        COURSE_OPTION,
        action="store_true",
        help="resume with other learning rates, decays or numbers of steps, and record the change",
    )
    parser.add_argument(
        "--replay-check",
        type=int,
        metavar="N",
        help="repeat N recorded steps before training continues, and stop if their losses differ",
    )
    parser.add_argument(
        "--xla-dump",
        nargs="?",
        const="first",
        choices=("first", "all"),
        help=f"write the XLA programs to {XLA_FOLDER}/ in the run folder: of the first process, or all",
    )
    parser.add_argument("--dry-run", action="store_true", help="print a summary of the run without training")
    parser.add_argument(
        "--devices", type=int, help="with --dry-run: number of GPUs (MI300X) that share the batch"
    )
    _add_process_options(parser)
    return parser


def _add_process_options(parser: Parser) -> None:
    """Adds options of processes, which are no config fields: a run can be resumed with other processes."""
    processes = parser.add_argument_group(
        "several processes", f"detected under SLURM and zaya launch; otherwise set by options, or by {NAMES}"
    )
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="address at which process 0 listens")
    processes.add_argument("--num-processes", type=int, help="number of processes")
    processes.add_argument("--process-id", type=int, help="number of this process, from 0")
    processes.add_argument(
        "--wait",
        default=hosts.LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"maximum time to wait for another process (default: {hosts.LIMIT_SECONDS:.0f})",
    )


def report(result: TrainResult, trackers: Trackers | None = None) -> None:
    """Prints the held-out loss of a run, a sample, and commands to use the model."""
    print(f"\nheld-out: {result.validation_bits_per_byte:.4f} bits/byte ({_compressors(result.corpus)})")
    if result.config.train.sample_tokens:
        with working("writing a sample"):
            # In all processes, because they gather the weights together.
            sample = _sample(result)
        print(f"\nsample at temperature {SAMPLE_TEMPERATURE}:\n{sample}")
        _record_sample(result.config, sample, trackers)
    print()
    zaya = zaya_command()
    # The word "zaya" is replaced by a path where it is not on PATH.
    print("\n".join(f"next: {zaya}{command.removeprefix('zaya')}" for command in follow_ups(result)))


def follow_ups(result: TrainResult) -> list[str]:
    """Returns `zaya` commands that evaluate or use a finished run, the most useful one last."""
    folder, base = result.config.run_folder, result.config.train.init_from
    # Together with the run that it started from, to show what has become better or worse.
    runs = (folder,) if base is None else (base, folder)
    report_of = shlex.join(("zaya", "report", *runs))
    folder = shlex.quote(folder)
    # A model of chats does not continue plain text well.
    if result.corpus.chat_template is not None:
        return [report_of, f"zaya chat {folder}"]
    # Not after preference training: the loss of pairs says little about bits per byte of texts.
    has_text = pathlib.Path(README).is_file() and not result.corpus.preferences
    evaluate = [f"zaya eval {folder} --text {README}"] if has_text else []
    return [report_of, *evaluate, generate_command(result.config.run_folder, _prompt(result))]


def _record_sample(config: Config, text: str, trackers: Trackers | None) -> None:
    """Writes a sample to the run folder once: a finished run that is started again generates the same one."""
    step = config.train.num_steps
    path = pathlib.Path(config.run_folder) / SAMPLES_FILE
    line = {"step": step, "temperature": SAMPLE_TEMPERATURE, "text": text}
    # A finished run that is started again must not append the same sample.
    if hosts.is_first() and line not in map(parse_line, lines_of(path)):
        append_line(path, line)
        write_text(config.run_folder, step, SAMPLE_TAG, text)
        if trackers is not None:
            trackers.text(step, SAMPLE_TAG, text)


def generate_command(run_folder: str, text: str) -> str:
    """Returns a shell command that generates from the first words of a text, or without a prompt."""
    words = f"zaya generate {shlex.quote(run_folder)}"
    prompt = first_words(text)
    # With "=", because a prompt may begin with dashes.
    return f"{words} --prompt={shlex.quote(prompt)}" if prompt else words


def first_words(text: str) -> str:
    """Returns whole words from the first line with printable characters; "" without any."""
    # Runs of spaces become one, because unprintable characters have been replaced by spaces.
    lines = (" ".join(_printable(line).split()) for line in text.splitlines())
    line = next(filter(None, lines), "")
    if len(line) <= PROMPT_LENGTH:
        return line
    # One more character than allowed, because a word may end exactly there. A single long word is cut.
    return line[: PROMPT_LENGTH + 1].rpartition(" ")[0] or line[:PROMPT_LENGTH]


def _printable(text: str) -> str:
    """Replaces unprintable characters, and those of truncated bytes, by spaces."""
    return "".join(each if each.isprintable() and each != "\ufffd" else " " for each in text)


def _prompt(result: TrainResult) -> str:
    """Returns the prompt of the sample and the proposed command: words that a user would try."""
    # For the default corpus a fixed prompt shows the style of the text best.
    if result.corpus.source.startswith("stdlib of Python "):  # the description of `open_source`
        return CODE_PROMPT
    return first_words(_held_out_text(result))


def _held_out_text(result: TrainResult) -> str:
    """Returns the beginning of the first held-out document."""
    # The last phase, whose text the model has seen last.
    data = result.config.resolved_phases[-1].config.data
    (batch,) = evaluation_batches(
        result.corpus, split="validation", sequence_length=data.sequence_length, batch_size=1, limit=1
    )
    tokens_T, segments_T = np.asarray(batch.tokens_BT)[0], np.asarray(batch.segments_BT)[0]
    # Segment 1 is the first document of the sequence; 0 is padding.
    return tokenizer_of(data).decode(tokens_T[segments_T == 1].tolist())


def _compressors(corpus: Corpus) -> str:
    """Describes the bits per byte of general compressors on the same files."""
    split = corpus.validation
    sizes = (("gzip -9", split.gzip_9_bytes), ("xz -9", split.xz_9_bytes))
    # A corpus may have been built without this measurement.
    rates = [f"{name} {8 * size / split.text_bytes:.3f}" for name, size in sizes if size is not None]
    return f"of the same files: {', '.join(rates)}" if rates else "compressors were not measured"


def _sample(result: TrainResult) -> str:
    config: Config = result.config
    tokenizer = tokenizer_of(config.data)
    # From the run's key, so that a repeated run generates the same sample.
    key = jax.random.fold_in(result.state.key, config.train.num_steps)
    # The prompt must leave space for at least one new token.
    max_length = config.model.max_position_embeddings
    prompt = tokenizer.delimiters.begin(tokenizer.encode(_prompt(result)))[: max_length - 1]
    tokens = generate(
        result.model,
        whole_variables(result.state, result.mesh),
        prompt,
        max_new_tokens=min(config.train.sample_tokens, max_length - len(prompt)),
        temperature=SAMPLE_TEMPERATURE,
        # Without its lowest bit the number fits a signed integer of 32 bits.
        seed=int(jax.random.bits(key)) >> 1,
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode([*prompt, *tokens])
