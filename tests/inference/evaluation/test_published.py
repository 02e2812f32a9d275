"""Published results next to those of a run: which ones match, and which differences are listed."""

import io
import pathlib
import re

from rich.console import Console

import zaya_jax
from zaya_jax.inference.evaluation.published import comparison_table, comparisons, published, sources_of

FOUND = {
    "results": {
        "hellaswag": {"acc,none": 0.5, "acc_norm,none": 0.6123, "acc_norm_stderr,none": 0.01},
        "mine": {"acc,none": 0.5},
        "boolq": {"f1,none": 0.5},
    },
    "groups": {"mmlu": {"acc,none": 0.25, "acc_stderr,none": 0.01}},
    "n-shot": {"hellaswag": 10, "mmlu": 0},
}


def shown(pairs, *, chat):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(pairs, chat=chat))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]


def test_tasks_are_compared_with_published_results():
    pairs = comparisons(FOUND)
    assert [(pair.task, round(pair.ours.value, 2)) for pair in pairs] == [
        ("mmlu", 25.0),
        ("hellaswag", 61.23),
    ]
    rows = shown(pairs, chat=False)
    assert ["HellaSwag", "this run", "61.2", "10", ""] in rows
    assert ["", "Gemma 3 12B", "84.2", "10", ""] in rows
    assert ["", "OLMoE-1B-7B", "80.0", "5", "shots"] in rows
    assert ["", "Qwen3-4B-Base", "73.0", "5", "shots"] in rows
    assert any(line.startswith("Gemma 3 12B: [Gemma-3-card], 2025-03; ") for line in sources_of(pairs))


def test_differences_in_settings_are_listed():
    (pair,) = comparisons(
        {"results": {"ifeval": {"prompt_level_strict_acc,none": 0.1}}, "n-shot": {"ifeval": 0}}
    )
    assert ["", "ZAYA1-8B", "85.6", "", "chat, thinks"] in shown([pair], chat=False)
    assert ["", "ZAYA1-8B", "85.6", "", "thinks"] in shown([pair], chat=True)
    assert ["", "Gemma 3 12B", "84.2", "10", "no chat"] in shown(comparisons(FOUND), chat=True)


def test_every_result_has_a_benchmark_and_a_source():
    benchmarks, models = published()
    tags = re.findall(
        r"^\| \[([\w-]+)\]", (pathlib.Path(zaya_jax.__file__).parent / "SOURCES.md").read_text(), re.M
    )
    assert {name for model in models for name in model.figures} == benchmarks.keys()
    assert {model.source for model in models} <= set(tags)
    assert len({model.name for model in models}) == len(models)
    for model in models:
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", model.date)
        assert all(25 < figure.value < 100 for figure in model.figures.values())
