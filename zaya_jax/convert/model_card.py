"""Model cards: metadata that the Hugging Face hub reads, and what a user of the weights needs to know.

The metadata is the front matter of README.md, in YAML. Its values are written as JSON, which is YAML too, so
that no package for YAML is needed.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.config import ModelConfig
from zaya_jax.convert.quantized.export import Quantization
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters

CARD = "README.md"
UNKNOWN_LICENSE = "unknown"
"""The hub's identifier of a license that is not known."""
_TASK = {"type": "text-generation", "name": "Text Generation"}


@dataclasses.dataclass(frozen=True)
class CardFigure:
    """A result of an evaluation.

    Attributes:
      dataset: name of the task, corpus or text.
      metric: name of the metric.
      value: value of the metric.
      settings: how it was measured, such as the context length and the number of few-shot examples.
    """

    dataset: str
    metric: str
    value: float
    settings: str


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """Contents of a model card that do not follow from the architecture.

    Attributes:
      name: name of the model.
      license: the hub's identifier of the license; None if it is not known.
      base_model: hub id of the model that the weights come from, or "ID at revision COMMIT"; None for none.
      datasets: hub ids of the data sets that the model was trained on.
      sections: Markdown sections on training and data.
      figures: results of evaluations.
    """

    name: str = "A ZAYA1 model"
    license: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    figures: tuple[CardFigure, ...] = ()


def model_card(
    config: ModelConfig,
    facts: CardFacts,
    story: Sequence[str],
    *,
    dtype: str,
    layout: str,
    quantization: Quantization | None = None,
) -> bytes:
    """Writes the card of a PyTorch folder.

    Args:
      config: architecture.
      facts: license, training, data and evaluations.
      story: sentences on the origin of the weights.
      dtype: name of the type of the weights.
      layout: layout of the folder, "native" or "legacy".
      quantization: how experts are quantized; None if they are not.
    """
    # The card of a folder answers what a reader would otherwise look up in config.json.
    types = f"{dtype}, experts {quantization.format}" if quantization is not None else dtype
    rows = {
        "parameters": f"{count_parameters(config):,}",
        "active parameters per token, without embedding": f"{active_parameters(config):,}",
        "layers": f"{config.num_hidden_layers}",
        "width": f"{config.hidden_size:,}",
        "query heads, key heads, head width": f"{config.num_attention_heads}, {config.num_key_value_heads}, "
        f"{config.head_dim}",
        "experts per layer, expert width": f"{config.num_experts}, {config.moe_intermediate_size:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "maximum sequence length": f"{config.max_position_embeddings:,}",
        "type of the weights": f"{types}; router biases float32",
        "layout": layout,
    }
    architecture = section("Architecture", markdown_table(("", ""), list(rows.items())))
    loading = _loading(layout, is_quantized=quantization is not None)
    return _card({"library_name": "transformers"}, facts, story, (architecture, *facts.sections), loading)


def adapter_card(facts: CardFacts, story: Sequence[str]) -> bytes:
    """Writes the card of a PEFT adapter."""
    code = 'from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, "FOLDER")'
    loading = section("How to load", f"```python\n{code}\n```")
    return _card({"library_name": "peft"}, facts, story, facts.sections, loading)


def _card(
    library: Mapping[str, str], facts: CardFacts, story: Sequence[str], sections: Sequence[str], loading: str
) -> bytes:
    parts = (
        f"# {_cell(facts.name)}",
        "\n".join(story),
        *sections,
        *([_evaluation(facts.figures)] if facts.figures else ()),
        loading,
        "`sha256sum --check SHA256SUMS` verifies the files.\n",
    )
    # A name of a corpus may hold half a surrogate pair, which has no encoding.
    text = front_matter({**library, **_metadata(facts)}) + "\n" + "\n\n".join(parts)
    return text.encode(errors="replace")


def _metadata(facts: CardFacts) -> dict[str, Any]:
    """The fields of the front matter, as the hub's documentation of model cards names them."""
    values: dict[str, Any] = {
        "license": facts.license or UNKNOWN_LICENSE,
        "pipeline_tag": _TASK["type"],
        "tags": ["zaya", "mixture-of-experts", "zaya_jax"],
    }
    if facts.base_model is not None:
        values["base_model"] = facts.base_model.partition(" ")[0]
    if facts.datasets:
        values["datasets"] = list(facts.datasets)
    # The hub requires a value, and JSON has none for NaN.
    figures = [figure for figure in facts.figures if math.isfinite(figure.value)]
    if figures:
        values["model-index"] = [{"name": facts.name, "results": list(map(_result, figures))}]
    return values


def _result(figure: CardFigure) -> dict[str, Any]:
    # The hub requires both fields, and has no id for a corpus or a task of the user.
    dataset = {"type": figure.dataset, "name": figure.dataset, "args": {"settings": figure.settings}}
    metric = {"type": figure.metric, "value": figure.value}
    return {"task": _TASK, "dataset": dataset, "metrics": [metric]}


def front_matter(values: Mapping[str, Any]) -> str:
    """The metadata of a card as YAML between two lines of dashes."""
    lines = [f"{name}: {json.dumps(_printable(value), ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(("---", *lines, "---", ""))


def _printable(value: Any) -> Any:
    """Replaces characters that YAML does not allow, which names of files may contain."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() else "?" for each in value)
    if isinstance(value, Mapping):
        return {name: _printable(each) for name, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


def section(title: str, content: str) -> str:
    """A section of a card."""
    return f"## {title}\n\n{content}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose cells may contain vertical bars and line breaks."""
    lines = (header, ("---",) * len(header), *rows)
    # A vertical bar or a line break in a name would start another cell or row.
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _evaluation(figures: Sequence[CardFigure]) -> str:
    rows = [(each.dataset, each.metric, f"{each.value:.4f}", each.settings) for each in figures]
    return section("Evaluation", markdown_table(("data", "metric", "value", "settings"), rows))


def _loading(layout: str, *, is_quantized: bool) -> str:
    """How to load the folder with each library that can."""
    # A folder of floating-point weights becomes a run first; a quantized one is read as it is.
    own = (
        "zaya_jax, which keeps experts quantized:\n\n```sh\nzaya chat FOLDER\nzaya serve FOLDER\n```"
        if is_quantized
        else "zaya_jax:\n\n```sh\nzaya convert FOLDER runs/imported\nzaya chat runs/imported\n```\n\n"
        "In Python, `zaya_jax.load_pytorch(FOLDER)` returns the model and its weights."
    )
    # transformers has no conversion of ZAYA1's experts from compressed-tensors.
    if is_quantized:
        engine = (
            "vLLM and SGLang, in versions that read Zyphra's quantized releases; the experts are in the form "
            "of compressed-tensors:\n\n```sh\nvllm serve FOLDER --no-enable-prefix-caching\n```"
        )
    # Only transformers 5.13 and later contain the native implementation.
    elif layout == "native":
        engine = (
            "transformers 5.13 or later:\n\n```python\nfrom transformers import AutoModelForCausalLM, "
            'AutoTokenizer\n\nmodel = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n\n'
            "vLLM, in versions that have ZAYA1:\n\n```sh\nvllm serve FOLDER --no-enable-prefix-caching\n```"
        )
    else:
        engine = (
            "Zyphra's fork of transformers, and SGLang:\n\n```sh\npython -m sglang.launch_server "
            "--model-path FOLDER\n```"
        )
    return section("How to load", f"{engine}\n\n{own}")
