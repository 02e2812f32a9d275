"""What is drawn of runs, in which order, and what each number means."""

import dataclasses
from collections.abc import Iterable

from zaya_jax.aegis.journal import TASKS

TOKENS = "tokens"
"""A column that is an axis."""
MOST_CHARTS = 60
"""Of one section: what a program of one's own logs may be without end."""
MEANINGS = {
    "loss": "Mean over the targets, in nats; dots, or dashes, are on held-out text.",
    "bits_per_byte": "By the bytes of text that targets stand for: comparable between tokenizers.",
    "learning_rate": "As the schedule has it.",
    "gradient_norm": "Of all that trains, before clipping.",
    "tokens_per_second": "Read by all devices, padding included, without evaluations and saves.",
    "model_flops_utilisation": "The model's FLOPs by the devices' peak; what is recomputed does not count.",
    "router_entropy": "Mean entropy of a token's probabilities over the classes, in nats, over all layers.",
    "router_probability": "Mean probability of the class that a token takes.",
    "load_entropy": "Of the experts' shares of tokens, by that of even shares: 1 is even.",
    "largest_load": "The largest of any expert in any layer, by an even share.",
    "smallest_load": "The smallest of any expert in any layer, by an even share.",
    "dead_experts": "Without a token in the step, over all layers.",
    "skipped": "Share of the tokens that take the class that skips the experts.",
    "skipped_steps": "Since the start, because of a NaN or an infinity.",
    "logit_bound": "No attention logit is larger.",
}
TITLES = {
    "bits_per_byte": "bits a byte",
    "tokens_per_second": "tokens a second",
    "model_flops_utilisation": "MFU",
    "skipped": "skipped tokens' share",
}
"""Where the name of a column is not the one that people use."""
LOGARITHMIC = ("gradient_norm", "update_norm")
"""Columns, or groups of them, that go through orders of magnitude."""
EXACT = ("learning_rate", "epochs", "skipped_steps", "logit_bound")
"""Columns, or groups of them, without noise: smoothed, they would only come late."""
PREFERENCES = ("rewards/", "logps/")


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture of one column of all runs.

    Attributes:
      column: its name in the metrics.
      title: that people read.
      meaning: a sentence; empty where the name must do.
      is_logarithmic: whether its axis is, at first.
      is_exact: whether it is drawn as it was written, however much the others are smoothed.
    """

    column: str
    title: str
    meaning: str
    is_logarithmic: bool
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class Section:
    """Charts that are read together.

    Attributes:
      title: that people read.
      charts: in their order.
      num_left_out: columns for which there is no room.
    """

    title: str
    charts: tuple[Chart, ...]
    num_left_out: int


_SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss", "bits_per_byte")),
    ("Preferences", PREFERENCES),
    ("Tasks", (f"{TASKS}/",)),
    ("Learning rate and throughput", ("learning_rate", "tokens_per_second", "model_flops_utilisation")),
    ("Gradient norms", ("gradient_norm", "gradient_norm/")),
    ("Update norms", ("update_norm/",)),
    (
        "Routers",
        (
            "load_entropy",
            "router_entropy",
            "router_probability",
            "skipped",
            "largest_load",
            "smallest_load",
            "dead_experts",
        ),
    ),
    ("Other numbers", ("",)),
)
"""Titles, and columns by name or, where the name ends in a stroke or is none, by their beginning."""


def sections_of(columns: Iterable[str]) -> list[Section]:
    """Charts of columns, each once; sections without one are left out."""
    left = [column for column in dict.fromkeys(columns) if column != TOKENS]
    found = []
    for title, wanted in _SECTIONS:
        chosen = [column for name in wanted for column in left if _is_meant(name, column)]
        left = [column for column in left if column not in chosen]
        if chosen:
            charts = tuple(map(_chart_of, chosen[:MOST_CHARTS]))
            found.append(Section(title, charts, len(chosen) - len(charts)))
    return found


def _is_meant(name: str, column: str) -> bool:
    return column.startswith(name) if name.endswith("/") or not name else column == name


def _chart_of(column: str) -> Chart:
    group = column.partition("/")[0]
    return Chart(
        column=column,
        title=_title(column),
        meaning=MEANINGS.get(column, ""),
        is_logarithmic=group in LOGARITHMIC,
        is_exact=group in EXACT,
    )


def _title(column: str) -> str:
    # Behind the stroke stands a name of the user's, such as a folder or a task.
    group, stroke, name = column.partition("/")
    if group == TASKS and stroke:
        return name
    return TITLES.get(column, group.replace("_", " ") + stroke + name)
