"""Published results of other models, next to the results of a run on the same benchmarks.

The results are those of [Llama-3-card], [OLMoE] Table 4, [Gemma-3-card], [Qwen3] Tables 6 and 7 and
[ZAYA1-8B] Table VII, each with its date and setting. Harnesses differ in their prompts, so the table lists
the differences.
"""

import dataclasses
import functools
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from zaya_jax.text_tables import name_column, number_column

FILE = "published.toml"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A result of a benchmark, in percent.

    Attributes:
      value: the result in percent.
      shots: number of few-shot examples; None if unknown.
      how: other settings, such as "CoT" for chain of thought.
    """

    value: float
    shots: int | None = None
    how: str = ""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark with published results.

    Attributes:
      title: display name.
      tasks: tasks of lm-eval for this benchmark.
      metrics: metrics of lm-eval; the first one that a task has is compared.
    """

    title: str
    tasks: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with published results.

    Attributes:
      name: name of the model.
      source: tag of the publication in SOURCES.md.
      date: date of the publication.
      setting: evaluator and settings.
      figures: results by benchmark.
      chat: whether questions were turns of a chat.
    """

    name: str
    source: str
    date: str
    setting: str
    figures: Mapping[str, Figure]
    chat: bool = False


@dataclasses.dataclass(frozen=True)
class PublishedComparison:
    """A result of this run with published results."""

    benchmark: Benchmark
    task: str
    ours: Figure
    others: tuple[tuple[Model, Figure], ...]


@functools.cache
def published() -> tuple[dict[str, Benchmark], tuple[Model, ...]]:
    """Returns all benchmarks by name, and all models."""
    values = tomllib.loads(
        importlib.resources.files("zaya_jax.inference.evaluation").joinpath(FILE).read_text("utf-8")
    )
    benchmarks = {
        name: Benchmark(fields["title"], tuple(fields["tasks"]), tuple(fields["metrics"]))
        for name, fields in values["benchmarks"].items()
    }
    models = tuple(
        Model(**fields | {"figures": {name: Figure(**figure) for name, figure in fields["figures"].items()}})
        for fields in values["models"]
    )
    return benchmarks, models


def comparisons(results: Mapping[str, Any]) -> list[PublishedComparison]:
    """Returns the results of a run with published results, for each task that has some.

    Args:
      results: results of `run_tasks`.
    """
    return list(_comparisons(results))


def _comparisons(results: Mapping[str, Any]) -> Iterator[PublishedComparison]:
    benchmarks, models = published()
    # lm-eval lists the averages of groups of tasks, such as MMLU's subjects, separately.
    by_task = results["results"] | results.get("groups", {})
    for name, benchmark in benchmarks.items():
        others = tuple((model, model.figures[name]) for model in models if name in model.figures)
        for task in (task for task in benchmark.tasks if task in by_task):
            # The first metric that the task has: preferred metrics come first in the file.
            value = next((by_task[task][each] for each in benchmark.metrics if each in by_task[task]), None)
            if isinstance(value, float | int):
                # lm-eval's metrics are shares, and publications give percent.
                ours = Figure(100 * value, results.get("n-shot", {}).get(task))
                yield PublishedComparison(benchmark, task, ours, others)


def comparison_table(pairs: list[PublishedComparison], *, chat: bool) -> Table:
    """Returns a table of the results, and of the differences in how they were measured.

    Args:
      pairs: results of `comparisons`.
      chat: whether the questions of the run were turns of a chat.
    """
    table = Table(
        name_column("benchmark"),
        name_column("model"),
        *map(number_column, ("%", "shots")),
        name_column("differs"),
    )
    for pair in pairs:
        table.add_row(pair.benchmark.title, "this run", f"{pair.ours.value:.1f}", _shots(pair.ours), "")
        for model, figure in pair.others:
            differs = ", ".join(_differences(pair.ours, figure, chat, model.chat))
            table.add_row("", model.name, f"{figure.value:.1f}", _shots(figure), differs)
    return table


def sources_of(pairs: list[PublishedComparison]) -> list[str]:
    """Returns a line for each model of a table with source, date and setting."""
    models = {model.name: model for pair in pairs for model, _ in pair.others}
    return [f"{model.name}: [{model.source}], {model.date}; {model.setting}" for model in models.values()]


def _shots(figure: Figure) -> str:
    return "" if figure.shots is None else str(figure.shots)


def _differences(ours: Figure, theirs: Figure, chat: bool, their_chat: bool) -> Iterator[str]:
    # An unknown number of shots is not listed as a difference.
    if None not in (ours.shots, theirs.shots) and ours.shots != theirs.shots:
        yield "shots"
    if chat != their_chat:
        yield "chat" if their_chat else "no chat"
    if theirs.how:
        yield theirs.how
