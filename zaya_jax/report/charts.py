"""Charts of runs: their order, titles and explanations."""

import dataclasses
from collections.abc import Iterable

from zaya_jax.run_folder.names import TASKS

TOKENS = "tokens"
"""A column that serves as an axis."""
MAX_CHARTS = 60
"""Maximum number of charts per section: a custom program may log any number of columns."""
MEANINGS = {
    "loss": "Mean over targets in nats per token; dots or dashes: held-out text.",
    "bits_per_byte": "Loss per byte of text: comparable between tokenizers.",
    "learning_rate": "Value of the schedule.",
    "gradient_norm": "Norm over all trained weights, before clipping.",
    "tokens_per_second": "All devices, padding included, without evaluations and saves.",
    "model_flops_utilisation": "The model's FLOP/s relative to the devices' peak, without recomputation.",
    "router_entropy": "Entropy of a token's class probabilities in nats, mean over tokens and layers.",
    "router_probability": "Mean probability of the selected class.",
    "load_entropy": "Entropy of the experts' token shares, relative to even shares: 1 is even.",
    "largest_load": "Largest load of an expert in any layer, relative to an even share.",
    "smallest_load": "Smallest load of an expert in any layer, relative to an even share.",
    "dead_experts": "Experts without a token in the step, over all layers.",
    "skipped": "Share of tokens routed to the skip class.",
    "skipped_steps": "Steps skipped since the start because of NaN or infinity.",
    "logit_bound": "Upper bound of attention logits.",
}
TITLES = {
    "bits_per_byte": "bits per byte",
    "tokens_per_second": "tokens/s",
    "model_flops_utilisation": "MFU",
    "skipped": "share of skipped tokens",
}
"""Titles of columns whose name is not the usual term."""
LOGARITHMIC = ("gradient_norm", "update_norm")
"""Columns, or groups of columns, that span orders of magnitude."""
EXACT = ("learning_rate", "epochs", "skipped_steps", "logit_bound")
"""Columns, or groups of columns, without noise: smoothing would only delay them."""
PREFERENCES = ("rewards/", "logps/")


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of one column of all runs.

    Attributes:
      column: name of the column in the metrics.
      title: title of the chart.
      meaning: one-sentence explanation; empty if the name is sufficient.
      is_logarithmic: whether its axis is logarithmic at first.
      is_exact: whether it is never smoothed.
    """

    column: str
    title: str
    meaning: str
    is_logarithmic: bool
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class Section:
    """Charts that belong together.

    Attributes:
      title: title of the section.
      charts: charts in display order.
      num_omitted: number of columns beyond the maximum.
    """

    title: str
    charts: tuple[Chart, ...]
    num_omitted: int


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
    # The empty prefix selects all columns that no other section has taken.
    ("Other numbers", ("",)),
)
"""Titles, and columns by name; a name that is empty or ends with a slash selects by prefix."""


def sections_of(columns: Iterable[str]) -> list[Section]:
    """Returns charts of the columns, each once; empty sections are omitted."""
    remaining = [column for column in dict.fromkeys(columns) if column != TOKENS]
    sections = []
    for title, wanted in _SECTIONS:
        # Order within a section follows `_SECTIONS`, then the metrics file.
        chosen = [column for name in wanted for column in remaining if _is_selected(name, column)]
        # Each column belongs to the first section that selects it.
        remaining = [column for column in remaining if column not in chosen]
        if chosen:
            charts = tuple(map(_chart_of, chosen[:MAX_CHARTS]))
            sections.append(Section(title, charts, len(chosen) - len(charts)))
    return sections


def _is_selected(name: str, column: str) -> bool:
    return column.startswith(name) if name.endswith("/") or not name else column == name


def _chart_of(column: str) -> Chart:
    # The column gradient_norm/experts, for example, belongs to the group gradient_norm.
    group = column.partition("/")[0]
    return Chart(
        column=column,
        title=_title(column),
        meaning=MEANINGS.get(column, ""),
        is_logarithmic=group in LOGARITHMIC,
        is_exact=group in EXACT,
    )


def _title(column: str) -> str:
    # The part after the slash is a user's name, such as that of a task: it is shown unchanged.
    group, slash, name = column.partition("/")
    if group == TASKS and slash:
        return name
    return TITLES.get(column, group.replace("_", " ") + slash + name)
