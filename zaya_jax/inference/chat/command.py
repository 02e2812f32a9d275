"""`zaya chat`: a conversation at the terminal, or through pipes, with a run that was trained on chats."""

import argparse
import dataclasses
import importlib
import io
import pathlib
import sys
from collections.abc import Iterator, Sequence

from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.tool_records import parse_tools
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import parse_value, read_limited
from zaya_jax.inference.chat.loop import COMMANDS, Answer, ChatLoop, typed_lines
from zaya_jax.inference.chat.messages import Conversation
from zaya_jax.inference.chat.session import ChatSession
from zaya_jax.inference.completion import text_of
from zaya_jax.inference.engine.generate import stream
from zaya_jax.inference.engine.sampling_params import check_seed
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.loading import LoadedRun, load_for_generation, require_chats, show_progress
from zaya_jax.inference.sampling_options import add_sampling_options, sampling_params
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.inference.structured.schema_option import (
    add_schema_option,
    compile_option,
    read_schema_option,
)
from zaya_jax.inference.tool_calls.markup import MARKUPS
from zaya_jax.inference.tool_calls.message_parser import ToolParsing
from zaya_jax.inference.tool_calls.template_markup import require_markup, select_markup
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya chat` until the input ends.

    Raises:
      UserError: if the run has no weights or no chat template, or, for input from a pipe, if a conversation
        cannot be answered.
    """
    options = _parser().parse_args(argv)
    check_seed(options.seed, "--seed")
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {options.max_new_tokens}; it must be at least 1")
    # Reading the weights can take minutes: check the template first.
    require_chats(options.run_folder, options.template)
    grammar = read_schema_option(options)
    show_progress(f"loading {options.run_folder}")
    run = load_for_generation(options.run_folder, options.weights)
    chat_format = run.chat_format(options.template)
    parsing = _tool_parsing(chat_format, options)
    is_interactive, is_terminal = sys.stdin.isatty(), sys.stdout.isatty()
    loop = ChatLoop(
        chat_format=chat_format,
        answer=_answers(run, chat_format, options, compile_option(run, grammar, options), parsing),
        write=_write,
        is_interactive=is_interactive,
        is_terminal=is_terminal,
        shows_thoughts=not options.hide_thinking,
        parsing=parsing,
    )
    if is_interactive:
        _greet(run)
    lines = typed_lines(on_screen=is_terminal) if is_interactive else _piped_lines()
    tools = tuple(parsing.tools) if parsing is not None else ()
    loop.run(Conversation(system=options.system, tools=tools), lines)


def _tool_parsing(chat_format: ChatFormat, options: argparse.Namespace) -> ToolParsing | None:
    """Returns how tool calls are parsed; None if the template does not support them.

    Raises:
      UserError: if there are tools, and the template does not support them, or a tool is invalid.
    """
    tools = ()
    if options.tools is not None:
        content = read_limited(pathlib.Path(options.tools))
        tools = parse_tools(parse_value(content, options.tools), options.tools, drops_nulls=False)
    markup = select_markup(chat_format, options.tool_call_parser)
    if tools:
        markup = require_markup(chat_format, markup)
    # Calls are shown without tools too: a model may have learned some that a system message describes.
    return None if markup is None else ToolParsing(markup, tools, chat_format.specials)


def _answers(
    run: LoadedRun,
    chat_format: ChatFormat,
    options: argparse.Namespace,
    constraint: Constraint | None,
    parsing: ToolParsing | None,
) -> Answer:
    """Returns a function that generates answers, as long as the rest of the context allows."""
    max_length = run.model.config.max_position_embeddings
    session = ChatSession(run.model, run.variables)
    constraint = constraint and constraint.with_thoughts(chat_format.think_ids)

    def answer(prompt: Sequence[int], number: int) -> Iterator[Piece]:
        if (num_left := max_length - len(prompt)) < 1:
            raise UserError(
                f"the conversation has {len(prompt)} tokens; with an answer it must not exceed "
                f"model.max_position_embeddings, {max_length}; /undo or /reset shortens it"
            )
        # Prompt and answer share the context.
        limit = min(options.max_new_tokens, num_left)
        params = sampling_params(
            options, max_new_tokens=limit, end_ids=chat_format.end_ids, constraint=constraint
        )
        # The seed changes with each answer: a question that is repeated after /undo gets another one.
        params = dataclasses.replace(params, seed=(options.seed + number) % 2**32)
        if options.context_devices == 1:
            tokens = session.stream(prompt, params)
        else:  # a shared cache has no prefix cache: each turn prefills the whole conversation
            model, devices = (run.model, run.variables), options.context_devices
            tokens = stream(*model, prompt, params, context_devices=devices)
        marks = chat_format.think_marks | (parsing.marks if parsing is not None else {})
        return text_of(run.tokenizer, tokens, params, marks=marks)

    return answer


def _greet(run: LoadedRun) -> None:
    importlib.import_module("readline")  # adds history and editing keys to `input`
    commands = ", ".join(COMMANDS)
    print(
        f"{run.folder}, step {run.step}. {commands}; Ctrl-C interrupts an answer", file=sys.stderr, flush=True
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    # A piece is shorter than a line, and a terminal shows text only at the end of one.
    sys.stdout.flush()


def _piped_lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # as a terminal does with bytes that are not text
    return (line.rstrip("\n") for line in sys.stdin)


def _parser() -> Parser:
    parser = Parser(
        "chat",
        "Chat with a run that was trained on chats: each line is a turn, and its answer appears as it is\n"
        "generated. Every turn applies the run's chat template to the whole conversation, as in training.\n\n"
        "commands, each on a separate line:\n"
        + "\n".join(f"  {command:<14}{text}" for command, text in COMMANDS.items())
        + "\n\nCtrl-C interrupts an answer; the conversation keeps the part that was generated. Ctrl-D ends\n"
        "the chat.",
        (
            "zaya chat runs/sft",
            'zaya chat runs/sft --system "Answer in one sentence." --temperature 0',
            "zaya chat runs/sft --hide-thinking < questions.txt    # one question per line",
            "zaya chat runs/tools --tools tools.json               # /tool TEXT answers a call",
        ),
    )
    parser.add_run_options()
    parser.add_argument("--system", default="", metavar="TEXT", help="system message (default: none)")
    parser.add_argument("--template", help='chat template, "zaya" or a Jinja file (default: that of the run)')
    parser.add_argument(
        "--tools", metavar="FILE", help="JSON list of tools that the model may call (default: none)"
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=tuple(MARKUPS),
        help="parser of tool calls (default: the one that reads what the template writes)",
    )
    parser.add_argument(
        "--hide-thinking",
        action="store_true",
        help="hide thoughts; by default they are dim on a terminal, and between <think> and </think> in a "
        "pipe",
    )
    parser.add_argument(
        "--max-new-tokens", default=1024, help="maximum tokens of an answer; fewer where the context ends"
    )
    add_sampling_options(parser)
    add_schema_option(parser)
    return parser
