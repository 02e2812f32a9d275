"""`zaya generate`: continues a prompt, or answers it, with the weights of a run."""

import sys
from collections.abc import Iterable, Sequence

from zaya_jax.checkpoint import load_run
from zaya_jax.data.chat_format import load_chat_format
from zaya_jax.data.kept_tokenizer import as_kept, kept_template
from zaya_jax.data.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.inference.generate import stream
from zaya_jax.model.zaya import Zaya
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya generate` with the words behind it, and prints the text as it comes.

    Raises:
      ValueError: if the run has no weights, or cannot continue such a prompt.
    """
    options = _parser().parse_args(argv)
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed is {options.seed}; it must be from 0 to 2**32 - 1")
    if options.chat and not options.prompt:
        raise ValueError("--chat answers what --prompt says; it must say something")
    if options.template is not None and not options.chat:
        raise ValueError("--template goes with --chat; without it a prompt is continued as it is")

    run = load_run(options.run_folder)
    tokenizer = tokenizer_of(as_kept(options.run_folder, run.config.data))
    if options.chat:
        chat_format = load_chat_format(options.template or kept_template(options.run_folder), tokenizer)
        prompt, end_id, shown = chat_format.prompt(options.prompt), chat_format.end_id, ""
    else:
        prompt = tokenizer.borders.begin(tokenizer.encode(options.prompt, specials=not options.letters))
        end_id, shown = tokenizer.eos_id, options.prompt
    pieces = stream(
        Zaya(run.config.model, run.config.execution),
        run.variables,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        eos_id=end_id,
        context_devices=options.context_devices,
    )
    sys.stdout.write(shown)
    _write(pieces, tokenizer)


def _parser() -> Parser:
    parser = Parser(
        "generate",
        "Continues a prompt, or answers it, with the newest weights of a run.",
        (
            'zaya generate runs/tiny --prompt "def main("',
            'zaya generate runs/tiny --prompt "import os" --temperature 0 --max-new-tokens 500',
            "zaya generate runs/tiny --top-p 0.95 --top-k 40 --seed 7    # from nothing",
            'zaya generate runs/sft --chat --prompt "What is a router?"',
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--prompt", default="", help="the text to continue (default: none)")
    parser.add_argument("--chat", action="store_true", help="answer the prompt, as the turn of a user")
    parser.add_argument("--template", help='of --chat: "zaya" or a Jinja file; default the run\'s own')
    parser.add_argument(
        "--letters", action="store_true", help="take a special token's name in the prompt as plain letters"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=None, help="sample from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=None, help="sample from the likeliest that make up P")
    parser.add_argument(
        "--context-devices",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the cache of a long text (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser


def _write(pieces: Iterable[int], tokenizer: Tokenizer) -> None:
    """Prints tokens as they come, each character when it is whole."""
    tokens: list[int] = []
    shown = ""
    for token in pieces:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # a character may need further tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print(tokenizer.decode(tokens)[len(shown) :])
