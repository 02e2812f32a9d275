"""Results of an evaluation as rows of a model card, each with its settings."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.convert.model_card import CardFigure
from zaya_jax.inference.evaluation.lm_eval_tasks import Tasks, figures_of
from zaya_jax.run_folder.events import is_finite


def card_figures(results: Mapping[str, Any], tasks: Tasks | None) -> list[dict[str, Any]]:
    """Returns the figures of `zaya eval`, for its JSON file and the option --eval of `zaya convert`.

    Args:
      results: results of the command, before they are written.
      tasks: how tasks were run; None without tasks.
    """
    figures = list(_of_texts(results))
    if tasks is not None:
        figures += _of_tasks(results, tasks)
    # A card has no place for NaN, such as a metric of no example.
    return [dataclasses.asdict(figure) for figure in figures if is_finite(figure.value)]


def _of_texts(results: Mapping[str, Any]) -> Iterator[CardFigure]:
    for text in results.get("text", {}).get("files", ()):
        settings = f"{text['num_tokens']:,} tokens, contexts of {results['context']:,} tokens"
        for metric in ("bits_per_byte", "nats_per_token"):
            yield CardFigure(text["name"], metric, text[metric], settings)


def _of_tasks(results: Mapping[str, Any], tasks: Tasks) -> Iterator[CardFigure]:
    scores = results["tasks"]
    for name, value in figures_of(scores).items():
        # The names of tasks do not hold a slash, but those of metrics may.
        task, _, metric = name.partition("/")
        shots = scores.get("n-shot", {}).get(task)
        examples = "all examples" if tasks.limit is None else f"the first {tasks.limit:,} examples"
        settings = [
            *([f"{shots} shots"] if shots is not None else ()),
            *(["chat template"] if tasks.chat else ()),
            *(["system instruction"] if tasks.system else ()),
            examples,
            f"contexts of {results['context']:,} tokens",
        ]
        yield CardFigure(task, metric, value, ", ".join(settings))
