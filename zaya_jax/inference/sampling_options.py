"""Command-line options for sampling, shared by `zaya generate`, `zaya chat` and `zaya think`."""

import argparse

from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.options import Parser


def add_sampling_options(parser: Parser) -> None:
    """Adds temperature, filters, stop strings, seed, and the number of devices that share a cache."""
    parser.add_argument(
        "--temperature", default=0.7, help="divisor of the logits; 0 selects the most likely token"
    )
    parser.add_argument("--top-k", type=int, help="sample from the K most likely tokens only")
    parser.add_argument(
        "--top-p",
        type=float,
        help="sample from the smallest set of most likely tokens with total probability P",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text before TEXT; repeatable"
    )
    parser.add_argument(
        "--context-devices",
        default=1,
        metavar="N",
        help="number of devices that share the cache of a long text",
    )
    parser.add_argument("--seed", default=0, help="seed of the random numbers")


def sampling_params(
    options: argparse.Namespace,
    *,
    max_new_tokens: int,
    end_ids: tuple[int, ...] = (),
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Returns the sampling parameters that the options set.

    Args:
      options: parsed options.
      max_new_tokens: maximum number of new tokens.
      end_ids: end tokens of the text.
      constraint: compiled grammar of the text; None for any text.

    Raises:
      UserError: for a value out of range.
    """
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_token_ids=end_ids,
        stop=tuple(options.stop),
        constraint=constraint,
    )
