"""`zaya chat`: a conversation at the terminal, or through pipes, with a run that has learned chats."""

import argparse
import dataclasses
import importlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.checkpoint import read_config
from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_template import ZAYA, load_template
from zaya_jax.data.kept_tokenizer import as_kept, kept_template
from zaya_jax.data.tokenizer import tokenizer_of
from zaya_jax.inference.chat_loop import COMMANDS, Answer, ChatLoop, typed_lines
from zaya_jax.inference.completion import stream_text, text_of
from zaya_jax.inference.continuer import Continuer
from zaya_jax.inference.conversation import Conversation
from zaya_jax.inference.loading import LoadedRun, load_for_writing
from zaya_jax.inference.sampling_options import add_sampling_options, check_seed, settings_of
from zaya_jax.inference.text import Piece
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya chat` with the words behind it, until the input ends.

    Raises:
      ValueError: if the run has no weights or no chat template; of input that no person types, also for a
        conversation that cannot be answered.
    """
    options = _parser().parse_args(argv)
    check_seed(options.seed, "--seed")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; it must be at least 1")
    if options.template is None:
        _require_template(options.run_folder)
    run = load_for_writing(options.run_folder)
    chat_format = run.chat_format(options.template)
    is_person, is_terminal = sys.stdin.isatty(), sys.stdout.isatty()
    loop = ChatLoop(
        chat_format=chat_format,
        answer=_answers(run, chat_format, options),
        write=_write,
        is_person=is_person,
        is_terminal=is_terminal,
        shows_thoughts=not options.hide_thinking,
    )
    if is_person:
        _greet(run)
    lines = typed_lines(on_screen=is_terminal) if is_person else _piped_lines()
    loop.run(Conversation(system=options.system), lines)


def _require_template(run_folder: str) -> None:
    """Sees to it that somebody taught the run chats, before its weights are read.

    Raises:
      ValueError: if neither its folder nor its tokenizer has a template.
    """
    tokenizer = tokenizer_of(as_kept(run_folder, read_config(run_folder).data))
    if load_template(kept_template(run_folder), tokenizer).name == ZAYA:
        raise ValueError(
            f"{run_folder} has no chat template: it has learned texts, not chats; zaya generate continues a "
            "text, zaya train --config=configs/sft.py teaches chats, and --template zaya, or that of a Jinja "
            "file, talks to it all the same"
        )


def _answers(run: LoadedRun, chat_format: ChatFormat, options: argparse.Namespace) -> Answer:
    """The network as one who answers, with as many tokens as its context still has."""
    allowed = run.model.config.max_position_embeddings
    continuer = Continuer(run.model, run.variables)

    def answer(prompt: Sequence[int], number: int) -> Iterator[Piece]:
        if (room := allowed - len(prompt)) < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens; with an answer it must not exceed "
                f"model.max_position_embeddings, {allowed}; /undo or /reset makes room"
            )
        limit = min(options.max_new_tokens, room)
        settings = settings_of(options, max_new_tokens=limit, eos_id=chat_format.end_id)
        # A question that is asked again, behind /undo, shall get another answer.
        settings = dataclasses.replace(settings, seed=(options.seed + number) % 2**32)
        shown: dict[str, Any] = {"stop": options.stop, "marks": chat_format.think_marks}
        if options.context_devices > 1:  # who shares a cache has it anew at each turn
            return stream_text(run.model, run.variables, run.tokenizer, prompt, settings, **shown)
        return text_of(run.tokenizer, continuer.stream(prompt, settings), settings, **shown)

    return answer


def _greet(run: LoadedRun) -> None:
    importlib.import_module("readline")  # gives `input` its history and its keys
    commands = ", ".join(COMMANDS)
    print(f"{run.folder}, step {run.step}. {commands}; Ctrl-C stops an answer", file=sys.stderr, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _piped_lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text is none in a terminal either
    return (line.rstrip("\n") for line in sys.stdin)


def _parser() -> Parser:
    parser = Parser(
        "chat",
        "Talks with a run that has learned chats: a line is a turn, and its answer comes as it is written.\n"
        "Every turn is the run's chat template applied to the whole conversation, as training saw it.\n\n"
        "commands, each a line of its own:\n"
        + "\n".join(f"  {command:<14}{what}" for command, what in COMMANDS.items())
        + "\n\nCtrl-C stops an answer, of which the conversation keeps what was written; Ctrl-D ends it.",
        (
            "zaya chat runs/sft",
            'zaya chat runs/sft --system "Answer in one sentence." --temperature 0',
            "zaya chat runs/sft --hide-thinking < questions.txt    # a line is a question",
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--system", default="", metavar="TEXT", help="told to the assistant before all turns")
    parser.add_argument("--template", help='"zaya" or a Jinja file; default the run\'s own')
    parser.add_argument(
        "--hide-thinking",
        action="store_true",
        help="do not print thoughts; on a terminal they are dim, in a pipe between their marks",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=1024,
        help="of an answer; fewer where the context ends (default: %(default)s)",
    )
    add_sampling_options(parser)
    return parser
