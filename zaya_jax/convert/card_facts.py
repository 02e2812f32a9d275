"""What a model card says of a run: training, data mixture and tokens, evaluations, license and base model."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.checkpoint import WeightsKind
from zaya_jax.config import Config, StepRange, step_ranges
from zaya_jax.convert.model_card import CARD, UNKNOWN_LICENSE, CardFacts, CardFigure, markdown_table, section
from zaya_jax.data.corpora.shards import Corpus, read_manifest
from zaya_jax.data.reading.mixture import mixture_of
from zaya_jax.errors import UserError
from zaya_jax.fields import build
from zaya_jax.files.json_files import read_json
from zaya_jax.run_folder.events import is_finite, parse_row
from zaya_jax.run_folder.names import METRICS_FILE, TASKS, VALIDATION

ORIGIN = "converted_from.json"
"""File of a run folder with the hub id, revision and license of the weights that the run comes from."""
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_HUB_DATA_SET = re.compile(r"data set ([\w.-]+/[\w.-]+) at revision ")
_HELD_OUT = "loss", "bits_per_byte", "accuracy"
"""Metrics of the held-out split that a card shows; loss is in nats per token."""


def check_license(name: str | None) -> str | None:
    """Returns the identifier of a license.

    Raises:
      UserError: if it does not have the form of the hub's identifiers.
    """
    if name is not None and not _LICENSE.fullmatch(name):
        raise UserError(
            f'--license is "{name}"; it must be an identifier of the Hugging Face hub, such as apache-2.0'
        )
    return name


def license_of(folder: pathlib.Path) -> str | None:
    """The license in the model card of a folder; None if it has none."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    # Front matter is the text between the first two lines of dashes.
    metadata = text.split("\n---", 1)[0] if text.startswith("---\n") else ""
    match = re.search(r"^license:\s*[\"']?([^\"'\s]+)", metadata, re.MULTILINE)

    return match[1] if match and match[1] != UNKNOWN_LICENSE and _LICENSE.fullmatch(match[1]) else None


def facts_of_run(folder: pathlib.Path, run: Config, *, step: int, weights: WeightsKind) -> CardFacts:
    """The facts of a run's weights.

    Args:
      folder: folder of the run.
      run: config of the run.
      step: step of the weights; 0 for weights that were converted, whose training is not known.
      weights: "raw", or their average, "ema".
    """
    # A run that starts from converted weights names them, and they have the license.
    origin = _origin(folder) or (_origin(pathlib.Path(run.train.init_from)) if run.train.init_from else {})
    facts = CardFacts(
        folder.absolute().name,
        license=origin.get("license"),
        base_model=origin.get("converted_from"),
    )
    # Without a step nothing was trained here, and the config is a default one.
    if not step:
        return facts
    read = [(each, _tokens(each, step)) for each in step_ranges(run) if each.first_step < step]
    mixtures = [mixture_of(each.phase.config.data) for each, _ in read]
    corpora = {name: _manifest(name) for mixture in mixtures for name in mixture.folders}
    matches = [_HUB_DATA_SET.search(corpus.source) for corpus in corpora.values() if corpus is not None]
    return dataclasses.replace(
        facts,
        datasets=tuple(sorted({match[1] for match in matches if match is not None})),
        sections=(_training(run, read, step), _data(read, corpora)),
        figures=tuple(figures_of_run(folder, run, step=step, weights=weights)),
    )


def origin_of(facts: CardFacts) -> dict[str, str]:
    """The content of `ORIGIN` for a run folder with the weights of a card; empty if nothing is known."""
    values = {"converted_from": facts.base_model, "license": facts.license}
    return {name: value for name, value in values.items() if value is not None}


def _origin(folder: pathlib.Path) -> Mapping[str, Any]:
    return read_json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}


def _tokens(step_range: StepRange, step: int) -> int:
    return step_range.tokens_until(min(step, step_range.end)) - step_range.first_token


def _manifest(folder: str) -> Corpus | None:
    """The manifest of a corpus; None if the corpus is not there any more."""
    # Weights can be converted on a machine that never had the data.
    try:
        return read_manifest(folder)
    except UserError:
        return None


def _training(run: Config, read: Sequence[tuple[StepRange, int]], step: int) -> str:
    """The section on how the model was trained, with a row per phase and batch size."""
    rows = []
    for each, tokens in read:
        config = each.phase.config
        optimizer = config.optimizer
        rate = f"{optimizer.learning_rate:g}"
        if optimizer.schedule != "constant":
            rate += f" to {optimizer.final_learning_rate:g}, {optimizer.schedule}"
        steps = f"{each.first_step + 1:,} to {min(step, each.end):,}"
        batch = f"{each.batch_size:,} x {each.sequence_length:,}"
        rows.append((each.phase.name or "all", steps, f"{tokens:,}", batch, optimizer.matrix_optimizer, rate))
    header = ("phase", "steps", "tokens", "batch x sequence", "optimizer", "learning rate")
    total = sum(tokens for _, tokens in read)
    text = f"Trained on {total:,} tokens in {step:,} of {run.train.num_steps:,} steps{_method(run)}."
    return section("Training", f"{text}\n\n{markdown_table(header, rows)}")


def _method(run: Config) -> str:
    """What differs from next-token training of all weights."""
    # Rank, beta and teacher are 0 or None where the method is not used.
    words = [f"adapters of rank {run.lora.rank} (LoRA)"] if run.lora.rank else []
    words += [f"preference loss with beta {run.dpo.beta:g}"] if run.dpo.beta else []
    words += ["distillation from a teacher"] if run.distillation.teacher else []
    return f"; {', '.join(words)}" if words else ""


def _data(read: Sequence[tuple[StepRange, int]], corpora: Mapping[str, Corpus | None]) -> str:
    """The section on the data mixture. Paths of this machine are reduced to names."""
    tokens_of_phase: dict[str, int] = {}
    for each, tokens in read:
        tokens_of_phase[each.phase.name] = tokens_of_phase.get(each.phase.name, 0) + tokens
    rows = []
    # The ranges of a batch-size ramp share one mixture.
    for name, config in {each.phase.name: each.phase.config for each, _ in read}.items():
        mixture = mixture_of(config.data)
        for folder, weight in zip(mixture.folders, mixture.weights, strict=True):
            share = weight / sum(mixture.weights)
            size, source = _described(corpora[folder])
            tokens = f"{round(share * tokens_of_phase[name]):,}"
            rows.append((name or "all", pathlib.PurePath(folder).name, f"{share:.2%}", tokens, size, source))
    header = ("phase", "corpus", "share", "tokens read", "tokens of the corpus", "source")
    return section("Data", markdown_table(header, rows))


def _described(corpus: Corpus | None) -> tuple[str, str]:
    """Size and source of a corpus, where they are known and public."""
    if corpus is None:
        return "", ""
    # Other sources are folders and files of the machine that built the corpus.
    is_public = _HUB_DATA_SET.search(corpus.source) or corpus.source.startswith("stdlib ")
    return f"{corpus.train.tokens:,}", corpus.source if is_public else ""


# Evaluations


def figures_of_run(
    folder: pathlib.Path, run: Config, *, step: int, weights: WeightsKind
) -> Iterator[CardFigure]:
    """Yields the newest evaluations in a run's metrics up to a step."""
    rows = _newest_rows(folder / METRICS_FILE, step)
    if (row := rows.get(VALIDATION)) is not None:
        config = run.phase_at(row["step"]).config
        limit = config.train.eval_sequences
        extent = "all held-out sequences" if limit is None else f"{limit:,} held-out sequences"
        settings = f"step {row['step']:,}, {extent} of {config.data.sequence_length:,} tokens"
        # The average of the weights has its own figures in the same row.
        prefix = "" if weights == "raw" else f"{weights}/"
        for metric in _HELD_OUT:
            if (value := row.get(prefix + metric)) is not None and is_finite(value):
                yield CardFigure(pathlib.PurePath(config.data.corpus).name, metric, float(value), settings)
    # Tasks are scored during training with the raw weights only.
    if weights == "raw" and (row := rows.get(TASKS)) is not None:
        config = run.phase_at(row["step"]).config
        settings = f"step {row['step']:,}, {_settings(config)}"
        for name, value in row.items():
            dataset, slash, metric = name.partition("/")
            if slash and is_finite(value):
                yield CardFigure(dataset, metric, float(value), settings)


def _settings(config: Config) -> str:
    """The settings of tasks during training."""
    tasks = config.tasks
    shots = "the task's own number of" if tasks.num_fewshot is None else str(tasks.num_fewshot)
    limit = "all examples" if tasks.limit is None else f"the first {tasks.limit:,} examples of each task"
    chat = "as chats, " if tasks.chat else ""
    context = tasks.context or config.data.sequence_length
    return f"{chat}{shots} shots, {limit}, contexts of {context:,} tokens"


def _newest_rows(path: pathlib.Path, step: int) -> dict[str, dict[str, Any]]:
    """The last row of each kind of evaluation, up to a step. After a rollback, later rows are valid."""
    rows: dict[str, dict[str, Any]] = {}
    kinds = VALIDATION, TASKS
    if not path.is_file():
        return rows
    with path.open("rb") as lines:
        for line in lines:
            # A long run has a hundred thousand rows of training, which need not be parsed.
            row = parse_row(line) if any(f'"{kind}"'.encode() in line for kind in kinds) else None
            if row is not None and row["kind"] in kinds and row["step"] <= step:
                rows[row["kind"]] = row
    return rows


def figures_of_file(file: str, *, step: int, weights: WeightsKind) -> list[CardFigure]:
    """Returns the figures of a file that `zaya eval --json` wrote.

    Raises:
      UserError: if it is no such file, or has figures of another step or kind of weights.
    """
    values = read_json(pathlib.Path(file))
    # Figures of other weights in a card would be false, so the file says which they belong to.
    try:
        figures = [build(CardFigure, each, "figures") for each in values["figures"]]
        measured = values["step"], values["weights"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} was not written by zaya eval --json: {error!r} is missing") from error
    if measured != (step, weights):
        raise UserError(
            f"{file} has figures of step {measured[0]}, {measured[1]} weights, but those of step {step}, "
            f"{weights} weights, are converted; evaluate these with zaya eval RUN --json FILE"
        )
    return figures
