"""What others have published of their models, beside what a run makes of the same benchmarks.

Figures are those of [Llama-3-card], [OLMoE] Table 4, [Gemma-3-card], [Qwen3] Tables 6 and 7 and [ZAYA1-8B]
Table VII, each with its date and setting. No harness asks quite as another, so that what differs is said.
"""

import dataclasses
import functools
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from zaya_jax.tables import name_column, number_column

FILE = "published.toml"


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a model makes of a benchmark, in percent.

    Attributes:
      value: the figure.
      shots: examples before each question; None where nobody says.
      how: what else was done, such as "CoT" for a thought before the answer.
    """

    value: float
    shots: int | None = None
    how: str = ""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Questions that several models were asked.

    Attributes:
      title: what people call it.
      tasks: of lm-eval, that ask it.
      metrics: of lm-eval, of which the first that a task has is compared.
    """

    title: str
    tasks: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """Whose figures these are.

    Attributes:
      name: of the model.
      source: the tag of the publication among our sources.
      date: of the publication.
      setting: who asked, and how.
      figures: by benchmark.
      chat: whether its questions were turns of a chat.
    """

    name: str
    source: str
    date: str
    setting: str
    figures: Mapping[str, Figure]
    chat: bool = False


@dataclasses.dataclass(frozen=True)
class Beside:
    """A figure of ours with those of others."""

    benchmark: Benchmark
    task: str
    ours: Figure
    others: tuple[tuple[Model, Figure], ...]


@functools.cache
def published() -> tuple[dict[str, Benchmark], tuple[Model, ...]]:
    """All benchmarks by name, and all models."""
    given = tomllib.loads(importlib.resources.files("zaya_jax.inference").joinpath(FILE).read_text("utf-8"))
    benchmarks = {
        name: Benchmark(fields["title"], tuple(fields["tasks"]), tuple(fields["metrics"]))
        for name, fields in given["benchmarks"].items()
    }
    models = tuple(
        Model(**fields | {"figures": {name: Figure(**figure) for name, figure in fields["figures"].items()}})
        for fields in given["models"]
    )
    return benchmarks, models


def beside(found: Mapping[str, Any]) -> list[Beside]:
    """Figures of a run with those of others, for each of its tasks that others were asked.

    Args:
      found: what `run_tasks` gives.
    """
    return list(_pairs(found))


def _pairs(found: Mapping[str, Any]) -> Iterator[Beside]:
    benchmarks, models = published()
    results = found["results"] | found.get("groups", {})
    for name, benchmark in benchmarks.items():
        others = tuple((model, model.figures[name]) for model in models if name in model.figures)
        for task in (task for task in benchmark.tasks if task in results):
            value = next((results[task][each] for each in benchmark.metrics if each in results[task]), None)
            if isinstance(value, float | int):
                ours = Figure(100 * value, found.get("n-shot", {}).get(task))
                yield Beside(benchmark, task, ours, others)


def beside_table(pairs: list[Beside], *, chat: bool) -> Table:
    """Figures of a run and of others, and what differs in how they were asked.

    Args:
      pairs: of `beside`.
      chat: whether the run was asked in turns of a chat.
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


def sources_of(pairs: list[Beside]) -> list[str]:
    """A line for each model of a table: where its figures are from, of when, and how they came about."""
    models = {model.name: model for pair in pairs for model, _ in pair.others}
    return [f"{model.name}: [{model.source}], {model.date}; {model.setting}" for model in models.values()]


def _shots(figure: Figure) -> str:
    return "" if figure.shots is None else str(figure.shots)


def _differences(ours: Figure, theirs: Figure, chat: bool, their_chat: bool) -> Iterator[str]:
    if None not in (ours.shots, theirs.shots) and ours.shots != theirs.shots:
        yield "shots"
    if chat != their_chat:
        yield "chat" if their_chat else "no chat"
    if theirs.how:
        yield theirs.how
