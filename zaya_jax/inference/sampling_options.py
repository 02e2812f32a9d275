"""The options by which `zaya generate` and `zaya chat` choose tokens."""

import argparse

from zaya_jax.inference.generate import Settings
from zaya_jax.options import Parser


def add_sampling_options(parser: Parser) -> None:
    """Adds temperature, filters, stop strings, the seed, and the devices that share a cache."""
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=None, help="sample from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=None, help="sample from the likeliest that make up P")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before TEXT; may be given several times",
    )
    parser.add_argument(
        "--context-devices",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the cache of a long text (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")


def check_seed(seed: int, name: str) -> None:
    """Refuses a seed that no key is made of.

    Raises:
      ValueError: with the name of the option or field.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} is {seed}; it must be from 0 to 2**32 - 1")


def settings_of(options: argparse.Namespace, *, max_new_tokens: int, eos_id: int | None) -> Settings:
    """What the options say of choosing tokens."""
    return Settings(
        max_new_tokens=max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        eos_id=eos_id,
        context_devices=options.context_devices,
    )
