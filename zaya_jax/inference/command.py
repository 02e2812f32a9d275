"""`zaya generate`: continues a prompt with the weights of a run."""

import sys
from collections.abc import Sequence

from zaya_jax.checkpoint import load_run
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.inference.generate import stream
from zaya_jax.model.zaya import Zaya
from zaya_jax.options import Parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya generate` with the words behind it, and prints the text as it comes.

    Raises:
      ValueError: if the run has no weights, or cannot continue such a prompt.
    """
    parser = Parser(
        "generate",
        "Continues a prompt with the newest weights of a run.",
        (
            'zaya generate runs/tiny --prompt "def main("',
            'zaya generate runs/tiny --prompt "import os" --temperature 0 --max-new-tokens 500',
            "zaya generate runs/tiny --top-p 0.95 --top-k 40 --seed 7    # from nothing",
        ),
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--prompt", default="", help="the text to continue (default: none)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=None, help="sample from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=None, help="sample from the likeliest that make up P")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed is {options.seed}; it must be from 0 to 2**32 - 1")

    run = load_run(options.run_folder)
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    prompt = [tokenizer.bos_id, *tokenizer.encode(options.prompt)]
    pieces = stream(
        Zaya(run.config.model, run.config.execution),
        run.variables,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        eos_id=tokenizer.eos_id,
    )
    sys.stdout.write(options.prompt)
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
