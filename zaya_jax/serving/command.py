"""`zaya serve`: answers requests of OpenAI's interface with the newest weights of a run."""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_template import ZAYA, load_template
from zaya_jax.data.kept_tokenizer import kept_template
from zaya_jax.inference.engine import Engine
from zaya_jax.inference.loading import LoadedRun, load_for_writing
from zaya_jax.inference.prompt_scores import score_prompt
from zaya_jax.options import Parser
from zaya_jax.serving.limits import ServingLimits

if TYPE_CHECKING:
    from zaya_jax.serving.served import ServedRun

LONGEST_DEFAULT = 8192
"""Tokens of a slot, where nobody says how many: each has the memory of all of them."""
KEY_VARIABLE = "ZAYA_API_KEY"
_LIMITS = ServingLimits()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya serve` with the words behind it, until it is told to end.

    Raises:
      ValueError: for options that cannot be, a port that cannot be had, or a run without weights.
    """
    options = _parser().parse_args(argv)
    _require_server()
    limits = _limits_of(options)
    key = _find_key(options)
    _check(options, key)
    # Only now: they need starlette and uvicorn.
    from zaya_jax.serving.running import listen, run_server

    listening = listen(options.host, options.port)
    origins = options.allow_origin
    with listening:
        run_server(_loader(options), listening, limits, key=key, host=options.host, origins=origins)


def _require_server() -> None:
    """Sees whether the packages of the server are there.

    Raises:
      ValueError: with what to install if they are not.
    """
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"a server needs {name}, which is not installed: pip install 'zaya_jax[serve]'")


def _limits_of(options: argparse.Namespace) -> ServingLimits:
    for name in ("slots", "max_waiting", "max_body_kib"):
        if getattr(options, name) < 1:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(options, name)}; it must be at least 1")
    for name in ("request_seconds", "drain_seconds"):
        if not 0 < getattr(options, name) < 1e9:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(options, name):g}; it must be above 0")
    if options.prefix_mib < 0:
        raise ValueError(f"--prefix-mib is {options.prefix_mib}; it must be 0 (keep nothing) or above")
    return dataclasses.replace(
        _LIMITS,
        body_bytes=options.max_body_kib * 1024,
        scoring=options.max_waiting,
        request_seconds=options.request_seconds,
        drain_seconds=options.drain_seconds,
    )


def _find_key(options: argparse.Namespace) -> str | None:
    """The key that clients must send: of the file, else of the environment; None for none.

    Raises:
      ValueError: for one that no client could send. It does not repeat the key.
    """
    if options.api_key_file is not None:
        place = options.api_key_file
        key = pathlib.Path(place).read_text(encoding="utf-8", errors="replace").strip()
    else:
        place, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{place} has no key in it; it must be one word of ASCII letters, digits and signs")
    return key


def _check(options: argparse.Namespace, key: str | None) -> None:
    """Refuses to let others in without a key.

    Raises:
      ValueError: with what would be right.
    """
    from zaya_jax.serving.gate import LOOPBACK

    if options.host not in LOOPBACK and key is None:
        raise ValueError(
            f"--host is {options.host}, where others may ask too; give --api-key-file or {KEY_VARIABLE}, or "
            "leave it at 127.0.0.1"
        )
    for origin in options.allow_origin:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise ValueError(f"--allow-origin is {origin}; it must be as http://localhost:3000, or *")


def _loader(options: argparse.Namespace) -> "Callable[[], ServedRun]":
    return lambda: load_served(options)


def load_served(options: argparse.Namespace) -> "ServedRun":
    """Reads a run, takes the memory of its slots, and compiles what a first request needs.

    Raises:
      ValueError: if it has no weights, or cannot be served so.
    """
    from zaya_jax.serving.served import ServedRun

    run = load_for_writing(options.run_folder)
    config, chat_format = run.model.config, _chat_format(run, options.template)
    longest = min(config.max_position_embeddings, LONGEST_DEFAULT)
    engine = Engine(
        run.model,
        run.variables,
        num_slots=options.slots,
        max_length=longest if options.max_length is None else options.max_length,
        prefix_bytes=options.prefix_mib * 2**20,
        max_waiting=options.max_waiting,
    )
    engine.warm_up()  # else the first client would wait, maybe a minute
    return ServedRun(
        name=options.model_name or pathlib.Path(options.run_folder).resolve().name,
        created=int(time.time()),
        tokenizer=run.tokenizer,
        chat_format=chat_format,
        engine=engine,
        score=lambda prompt, num_top: score_prompt(run.model, run.variables, prompt, num_top=num_top),
        vocab_size=config.vocab_size,
        max_length=engine.max_length,
        num_layers=config.num_hidden_layers,
        num_experts=config.num_experts,
        num_places=options.slots + options.max_waiting,
    )


def _chat_format(run: LoadedRun, template: str | None) -> ChatFormat | None:
    """How a run was taught chats; None for one that nobody taught any."""
    if template is None and load_template(kept_template(run.folder), run.tokenizer).name == ZAYA:
        return None
    return run.chat_format(template)


def _parser() -> Parser:
    parser = Parser(
        "serve",
        "Serves the newest weights of a run with OpenAI's interface, and a page to chat with it.\n\n"
        "POST /v1/chat/completions, /v1/completions; GET /v1/models, /health, /metrics, / (the page).\n"
        "SIGTERM and Ctrl-C let it finish what it is writing; a second one does not wait.\n\n"
        "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n"
        '  -d \'{"prompt": "def main(", "max_tokens": 32}\'',
        (
            "zaya serve runs/sft",
            "zaya serve runs/sft --port 0                # any free port; the address is printed",
            "zaya serve runs/tiny --slots 32 --max-length 1024",
            "ZAYA_API_KEY=... zaya serve runs/sft --host 0.0.0.0",
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--host", default="127.0.0.1", help="that it listens at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any (default: %(default)s)")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"holds the key that clients must send; else {KEY_VARIABLE} (default: no key, on loopback)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a page that may ask from a browser, as http://localhost:3000; may be given several times",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="as clients ask for it (default: the folder's name)"
    )
    parser.add_argument("--template", help='of chats: "zaya" or a Jinja file; default the run\'s own')
    _add_limits(parser)
    return parser


def _add_limits(parser: Parser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument("--slots", type=int, default=16, help="texts at a time (default: %(default)s)")
    limits.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of a prompt and its answer (default: the network's, at most {LONGEST_DEFAULT:,})",
    )
    limits.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="texts that wait for a slot; more are refused with 429 (default: %(default)s)",
    )
    limits.add_argument(
        "--prefix-mib",
        type=int,
        default=256,
        metavar="N",
        help="memory for beginnings that prompts share; 0 for none (default: %(default)s)",
    )
    limits.add_argument(
        "--max-body-kib",
        type=int,
        default=_LIMITS.body_bytes // 1024,
        metavar="N",
        help="size of a request (default: %(default)s)",
    )
    for name, meaning in (
        ("request", "until an answer must be whole"),
        ("drain", "for answers to end behind SIGTERM"),
    ):
        limits.add_argument(
            f"--{name}-seconds",
            type=float,
            default=getattr(_LIMITS, f"{name}_seconds"),
            metavar="S",
            help=f"{meaning} (default: %(default)g)",
        )
