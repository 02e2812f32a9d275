"""`zaya serve`: serves the latest checkpoint of a run with an OpenAI-compatible API."""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.prompt_scores import PromptScorer
from zaya_jax.inference.loading import LoadedRun, has_chat_template, load_for_generation
from zaya_jax.inference.structured.compiler import is_available
from zaya_jax.inference.tool_calls.markup import MARKUPS
from zaya_jax.inference.tool_calls.template_markup import select_markup
from zaya_jax.options import Parser
from zaya_jax.platform.host_header import LOOPBACK
from zaya_jax.platform.shell import install_command
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.load_progress import LoadProgress

if TYPE_CHECKING:
    from zaya_jax.serving.loaded_model import LoadedModel

DEFAULT_MAX_LENGTH = 8192
"""Upper limit of the default of `--max-length`: each slot reserves memory for that many tokens."""
KEY_VARIABLE = "ZAYA_API_KEY"
NO_TEMPLATE = "none"
"""Value of `--template` that disables chats, for a tokenizer whose template is broken."""
_LIMITS = ServingLimits()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya serve` until a signal stops it.

    Args:
      argv: arguments of the command.

    Raises:
      UserError: for invalid options, a port in use, or a run without weights.
    """
    options = _parser().parse_args(argv)
    _require_packages()
    limits = _limits_of(options)
    key = _find_key(options)
    _check(options, key)
    # Imported late: it needs the packages of the `serve` extra.
    from zaya_jax.serving.server import listen, run_server

    # Listen before loading: a port in use is reported at once, and health checks see "loading" meanwhile.
    listening = listen(options.host, options.port)
    origins = options.allow_origin
    with listening:
        run_server(
            lambda: load_model(options), listening, limits, key=key, host=options.host, origins=origins
        )


def _require_packages() -> None:
    """Checks that the packages of the `serve` extra are installed.

    Raises:
      UserError: if one is missing, with the command that installs it.
    """
    for name in ("starlette", "uvicorn", "pydantic"):
        # `find_spec` does not import the package, so that `zaya serve --help` stays fast.
        if importlib.util.find_spec(name) is None:
            raise UserError(f"zaya serve needs {name}, which is not installed: {install_command('serve')}")


def _limits_of(options: argparse.Namespace) -> ServingLimits:
    for name in ("slots", "max_waiting", "max_body_kib", "max_client_connections"):
        if getattr(options, name) < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} is {getattr(options, name)}; it must be at least 1")
    for name in ("read_seconds", "request_seconds", "drain_seconds"):
        if not 0 < getattr(options, name) < 1e9:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} is {getattr(options, name):g}; it must be above 0")
    if options.prefix_mib < 0:
        raise UserError(
            f"--prefix-mib is {options.prefix_mib}; it must be at least 0; 0 disables the prefix cache"
        )
    return dataclasses.replace(
        _LIMITS,
        body_bytes=options.max_body_kib * 1024,
        client_connections=options.max_client_connections,
        scoring=options.max_waiting,
        read_seconds=options.read_seconds,
        request_seconds=options.request_seconds,
        drain_seconds=options.drain_seconds,
    )


def _find_key(options: argparse.Namespace) -> str | None:
    """Returns the key that clients must send, from the file or the environment; None for none.

    Raises:
      UserError: for a key that no client could send. The message does not contain the key.
    """
    if options.api_key_file is not None:
        place = options.api_key_file
        # Editors end a file with a new line, which is not part of the key.
        key = pathlib.Path(place).read_text(encoding="utf-8", errors="replace").strip()
    else:
        place, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    # A header cannot carry other keys. Without this check the server would refuse every client.
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{place} has no valid key; it must be one word of ASCII letters, digits and signs")
    return key


def _check(options: argparse.Namespace, key: str | None) -> None:
    """Checks that a server that other machines can reach has a key, and that origins are URLs.

    Raises:
      UserError: if not.
    """
    # Refuse instead of warning: without a key, anybody on the network could use the accelerator.
    if options.host not in LOOPBACK and key is None:
        raise UserError(
            f"--host is {options.host}, which other machines can reach; set --api-key-file or "
            f"{KEY_VARIABLE}, or use the default 127.0.0.1"
        )
    for origin in options.allow_origin:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise UserError(
                f"--allow-origin is {origin}; it must be a URL such as http://localhost:3000, or *"
            )


def load_model(options: argparse.Namespace) -> "LoadedModel":
    """Loads the model of a run, allocates its slots and compiles all programs, and prints the progress.

    Args:
      options: parsed options of `zaya serve`.

    Raises:
      UserError: if the run has no weights, or does not support the options.
    """
    from zaya_jax.serving.loaded_model import LoadedModel

    with LoadProgress(f"loading the weights of {options.run_folder}") as progress:
        run = load_for_generation(options.run_folder, options.weights)
        config, chat_format = run.model.config, _chat_format(run, options.template)
        # Selected before the programs are compiled: an error comes early.
        markup = None if chat_format is None else select_markup(chat_format, options.tool_call_parser)
        engine = _engine(run, options)
        progress.report(f"weights of step {run.step:,} are loaded")
        # The engine computes logits only for new tokens. Scores of prompts need a separate program.
        scorer = PromptScorer(run.model, engine.variables, max_length=engine.max_length)
        # Without the `structured` extra no request can need masks.
        with_masks = is_available() and run.tokenizer.token_bytes() is not None
        progress.compile(engine, scorer, with_masks=with_masks)
    model = LoadedModel(
        name=options.model_name or pathlib.Path(options.run_folder).resolve().name,
        created=int(time.time()),
        tokenizer=run.tokenizer,
        chat_format=chat_format,
        tool_markup=markup,
        engine=engine,
        score=scorer.score,
        vocab_size=config.vocab_size,
        max_length=engine.max_length,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        capacity=options.slots + options.max_waiting,
    )
    if with_masks:
        model.grammars.prepare()
    return model


def _engine(run: LoadedRun, options: argparse.Namespace) -> Engine:
    # Each slot reserves the memory of max_length tokens, whether a text uses them or not.
    longest = min(run.model.config.max_position_embeddings, DEFAULT_MAX_LENGTH)
    return Engine(
        run.model,
        run.variables,
        num_slots=options.slots,
        max_length=longest if options.max_length is None else options.max_length,
        prefix_bytes=options.prefix_mib * 2**20,
        max_waiting=options.max_waiting,
    )


def _chat_format(run: LoadedRun, template: str | None) -> ChatFormat | None:
    """Returns the chat format of a run; None if it has none, or chats are disabled."""
    # Some tokenizers bring a template although the model was not trained on chats: it is used only on
    # request.
    if template == NO_TEMPLATE or (template is None and not has_chat_template(run.folder, run.tokenizer)):
        return None
    return run.chat_format(template)


def _parser() -> Parser:
    parser = Parser(
        "serve",
        "Serve the latest checkpoint of a run with an OpenAI-compatible API and a chat page.\n\n"
        "POST /v1/chat/completions, /v1/completions; GET /v1/models, /health, /metrics, / (the page).\n"
        "SIGTERM, SIGHUP or Ctrl-C stops it after the running responses; a second signal does not wait.\n\n"
        "  curl http://127.0.0.1:8000/v1/completions \\\n"
        "    -H 'Content-Type: application/json' \\\n"
        '    -d \'{"prompt": "def main(", "max_tokens": 32}\'',
        (
            "zaya serve runs/sft",
            "zaya serve runs/sft --port 0                # any free port; the address is printed",
            "zaya serve runs/tiny --slots 32 --max-length 1024",
            "ZAYA_API_KEY=... zaya serve runs/sft --host 0.0.0.0",
        ),
    )
    parser.add_run_options()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", default=8000, help="port to listen on, 0 for any free one")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the key that clients must send (default: the variable {KEY_VARIABLE}; a loopback "
        "address needs no key)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of a web page that may send requests (CORS), such as http://localhost:3000; repeatable",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="name of the model in requests (default: the folder's name)"
    )
    parser.add_argument(
        "--template",
        help='chat template: "zaya", a Jinja file, or "none" to serve no chats (default: the run\'s)',
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=tuple(MARKUPS),
        help="parser of tool calls (default: the one that reads what the template writes)",
    )
    _add_limits(parser)
    return parser


def _add_limits(parser: Parser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument("--slots", default=16, help="maximum number of texts generated at a time")
    limits.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"maximum tokens of prompt and response (default: the model's, at most {DEFAULT_MAX_LENGTH:,})",
    )
    limits.add_argument(
        "--max-waiting",
        default=256,
        metavar="N",
        help="maximum number of texts that wait for a slot; more are refused with 429",
    )
    limits.add_argument(
        "--prefix-mib", default=256, metavar="N", help="memory of the prefix cache in MiB; 0 disables it"
    )
    limits.add_argument(
        "--max-body-kib",
        default=_LIMITS.body_bytes // 1024,
        metavar="N",
        help="maximum size of a request body in KiB",
    )
    limits.add_argument(
        "--max-client-connections",
        default=_LIMITS.client_connections,
        metavar="N",
        help="maximum open connections per client address, at most half of all; clients of a proxy count as "
        "one",
    )
    for name, meaning in (
        ("read", "time limit for parsing, validating and tokenizing a request, in seconds"),
        ("request", "time limit for a complete response, in seconds"),
        ("drain", "time for running responses to end after SIGTERM, in seconds"),
    ):
        limits.add_argument(
            f"--{name}-seconds",
            default=getattr(_LIMITS, f"{name}_seconds"),
            metavar="S",
            help=f"{meaning} (default: %(default)g)",
        )
