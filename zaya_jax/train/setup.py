"""Preparation of a run: checks its config, opens its corpora, and creates or reuses its folder."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import optax
from jax.sharding import Mesh

from zaya_jax.checkpoint import RunLock, SavedStep, Verify, set_aside_later, verified_together
from zaya_jax.config import CONFIG_FILE, Config, StepRange, in_phase
from zaya_jax.data.corpora.ensure import ensure_corpus, ensure_tokenizer, open_corpus_for
from zaya_jax.data.corpora.shards import Corpus, read_manifest
from zaya_jax.data.corpora.text_bytes import padded_text_bytes
from zaya_jax.data.reading.batch import Batch, chosen_answers
from zaya_jax.data.reading.loader import Reference, Share, Teacher, num_sequences, training_batches
from zaya_jax.data.reading.mixture import MixturePosition, mixture_of
from zaya_jax.data.tokenizers.saved_tokenizer import save_tokenizer
from zaya_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.errors import UserError
from zaya_jax.model.adapters import declare_run
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel.mesh import local_rows, local_tokens, with_context
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.tree.exchanges import join
from zaya_jax.run_folder.events import write_event
from zaya_jax.run_folder.names import DAMAGED
from zaya_jax.train.consistency.provenance import (
    Provenance,
    check_corpora_of_copy,
    check_same_corpora,
    fingerprints,
)
from zaya_jax.train.consistency.same_run import check_same_data
from zaya_jax.train.derived_config import with_base_dtype, with_schedule
from zaya_jax.train.extensions import NO_EXTENSIONS, Extensions
from zaya_jax.train.heartbeats import RESTORE, Heartbeats
from zaya_jax.train.hooks.skipped_ranges import NO_SKIPPED_RANGES, SkippedRanges, shared_skipped_ranges
from zaya_jax.train.metrics.files import text_bytes
from zaya_jax.train.peer_copies.host_state import copy_layout
from zaya_jax.train.peer_copies.restart import RestoredCopy, find_start
from zaya_jax.train.phase_summary import check_devices
from zaya_jax.train.run_folder_checks import check_folder, prepare_folder
from zaya_jax.train.step.state import TrainSetup, make_setup

References = Mapping[tuple[str, str], Reference]
"""Reference log-probabilities by corpus folder and split."""
BUILD_SECONDS = 24 * 3600.0
"""Time limit for the process that builds a corpus, while others wait."""


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A checked config with its open corpora, devices and starting checkpoint.

    Attributes:
      config: config of the run.
      corpora: corpora by folder: those of all phases, and the one whose held-out split is evaluated.
      token_bytes_V: bytes of text per token, shape [V].
      mesh: all devices.
      schedule: learning rate by completed steps.
      start: checkpoint to start from, of this run or another one; None for fresh weights.
      copy: peers' copy of that step of this run, which is restored instead of the checkpoint; None without.
      provenance: origin of the run, which its checkpoints record.
      extensions: custom optimizer and batch function.
      skipped_ranges: steps whose batches are skipped.
      references: log-probabilities of answers under the initial weights, for preference training.
      teachers: predictions of the teacher by corpus folder and split, for distillation.
    """

    config: Config
    corpora: dict[str, Corpus]
    token_bytes_V: np.ndarray
    mesh: Mesh
    schedule: optax.Schedule
    start: SavedStep | None
    provenance: Provenance
    copy: RestoredCopy | None = None
    extensions: Extensions = NO_EXTENSIONS
    skipped_ranges: SkippedRanges = NO_SKIPPED_RANGES
    references: References = dataclasses.field(default_factory=dict)
    teachers: Mapping[tuple[str, str], Teacher] = dataclasses.field(default_factory=dict)

    @property
    def corpus(self) -> Corpus:
        """Corpus whose held-out split is evaluated."""
        return self.corpora[self.config.data.corpus]

    @property
    def num_tokens(self) -> dict[str, int]:
        """Number of training tokens of each corpus, by folder."""
        return {folder: corpus.train.tokens for folder, corpus in self.corpora.items()}

    @property
    def training_references(self) -> dict[str, Reference]:
        """Reference log-probabilities (DPO) of the training splits, by corpus folder."""
        return {folder: each for (folder, split), each in self.references.items() if split == "train"}

    @property
    def training_teachers(self) -> dict[str, Teacher]:
        """Predictions of the training splits, by folder."""
        return {folder: each for (folder, split), each in self.teachers.items() if split == "train"}

    @property
    def held_out_teacher(self) -> Teacher | None:
        """Predictions of the held-out split."""
        return self.teachers.get((self.config.data.corpus, "validation"))

    @property
    def held_out_reference(self) -> Reference | None:
        """Reference log-probabilities (DPO) of the held-out split; None without DPO."""
        return self.references.get((self.config.data.corpus, "validation"))

    def mesh_of(self, config: Config) -> Mesh:
        """Returns the devices of a phase; its config sets how many of them share a sequence."""
        return with_context(self.mesh, config.execution.context_devices)

    def share_of(self, config: Config, batch_size: int) -> Share:
        """Returns this process's share of a phase's batches of some size."""
        mesh = self.mesh_of(config)
        return Share(local_rows(mesh, batch_size), local_tokens(mesh, config.data.sequence_length))

    def setup(self, config: Config) -> TrainSetup:
        """Returns the network, loss and optimizer of a phase with this config."""
        return make_setup(config, self.mesh.size, self.schedule, optimizer=self.extensions.optimizer)

    def read_batches(
        self, step_range: StepRange, position: MixturePosition, *, num_steps: int | None = None
    ) -> Iterator[Batch]:
        """Returns this process's share of the batches of a range of steps.

        Args:
          step_range: steps to read for.
          position: position in the data mixture at the start of the range.
          num_steps: number of steps to read; None for all steps of the range.
        """
        config, first_step = step_range.phase.config, step_range.first_step + 1
        batches = training_batches(
            position,
            self.corpora,
            batch_size=step_range.batch_size,
            num_steps=step_range.num_steps if num_steps is None else min(step_range.num_steps, num_steps),
            share=self.share_of(config, step_range.batch_size),
            num_threads=config.execution.read_threads,
            references=self.training_references,
            teachers=self.training_teachers,
            first_index=step_range.first_step * step_range.batch_size if config.watch.checksums else None,
        )
        # Masked last: whatever an extension makes of a batch, a skipped step must change no weight. And here,
        # so that a replay of recorded steps reads the same batches.
        return self.skipped_ranges.mask(self.extensions.of_batches(batches), first_step=first_step)

    def text_bytes(self, batch: Batch) -> float:
        """Returns the bytes of text of a batch's targets; for preferences, those of the chosen answers."""
        weights_BT = np.asarray(batch.weights_BT)
        # A rejected answer is no text that the model should generate.
        if self.config.dpo.beta:
            weights_BT = weights_BT * chosen_answers(batch)
        return text_bytes(np.asarray(batch.targets_BT), weights_BT, self.token_bytes_V)


def prepare_run(
    config: Config,
    mesh: Mesh,
    lock: RunLock | None,
    *,
    heartbeats: Heartbeats,
    overwrite: bool,
    change_course: bool = False,
    extensions: Extensions = NO_EXTENSIONS,
    on_checked: Callable[[Config, int], None] = lambda *_: None,
) -> PreparedRun:
    """Checks a run before anything is compiled, opens its corpora and creates its folder.

    Args:
      config: config of the run.
      mesh: all devices.
      lock: lock of the run folder; None in all processes but the first.
      heartbeats: heartbeats of this process, which record how long a checkpoint is verified.
      overwrite: whether to remove what the run folder holds.
      change_course: whether a resumed run may have other learning rates, decays or lengths.
      extensions: custom optimizer and batch function.
      on_checked: called before data is opened or built, with the config and the number of completed steps.

    Raises:
      UserError: for a config, corpus or folder that cannot work.
    """
    config = _checked_config(config, mesh, overwrite=overwrite)
    check = functools.partial(_check_shared_folder, config, overwrite=overwrite, change_course=change_course)
    # Before minutes are spent on a corpus. Every byte of a checkpoint is read, for hours in a large run,
    # which the goodput must account for.
    with heartbeats.within(RESTORE):
        layout = functools.partial(copy_layout, config, mesh, extensions)
        start, copy = find_start(config, layout, check, overwrite=overwrite)
    on_checked(config, start.step if start is not None and start.run_folder == config.run_folder else 0)
    corpora = _open_data_in_turn(config)
    # Last: a run that was refused has not touched the old one.
    hosts.run_on_first(
        "folder", lambda: _take_folder(config, start, copy, corpora, lock, overwrite=overwrite)
    )
    _check_shared(config)
    return PreparedRun(
        config=config,
        corpora=corpora,
        # As long as the embedding, which may have more rows than the tokenizer has tokens.
        token_bytes_V=padded_text_bytes(
            tokenizer_of(config.data), corpora[config.data.corpus], vocab_size=config.model.vocab_size
        ),
        mesh=mesh,
        schedule=learning_rate_schedule(config),
        start=start,
        copy=copy,
        provenance=Provenance(config, fingerprints(corpora), mesh.size),
        extensions=extensions,
        # After the folder is taken: ranges of a removed run do not count.
        skipped_ranges=shared_skipped_ranges(config.run_folder),
    )


def _checked_config(config: Config, mesh: Mesh, *, overwrite: bool) -> Config:
    """Checks the config, and completes it with what depends on data and on the base of adapters."""
    # On all of them: devices are counted by each process, and each error names its process.
    hosts.run_on_all("config", lambda: _check_config(config, mesh))
    config = with_base_dtype(config, overwrite=overwrite)
    # By one process, which builds a missing corpus; the others read its config.
    derived = hosts.run_on_first(
        "schedule", lambda: with_schedule(config).to_text(), limit_seconds=BUILD_SECONDS
    )
    return Config.from_text(hosts.broadcast_from_first("schedule", derived))


def _check_shared_folder(
    config: Config, copied: int | None, *, overwrite: bool, change_course: bool
) -> SavedStep | None:
    """`check_folder` by one process for all, so that all resume from the same step."""

    def check(verify: Verify) -> SavedStep | None:
        return check_folder(
            config, overwrite=overwrite, change_course=change_course, copied=copied, verify=verify
        )

    found = verified_together("run folder", check)
    values = hosts.broadcast_from_first("start", found and dataclasses.astuple(found))
    return None if values is None else SavedStep(*values)


def _check_config(config: Config, mesh: Mesh) -> None:
    check_devices(config, mesh.size)
    for phase in config.resolved_phases:
        with in_phase(phase.name):
            with_context(mesh, phase.config.execution.context_devices)
    declare_run(config)  # for its UserError: each pattern of weights must match a weight


def _open_data_in_turn(config: Config) -> dict[str, Corpus]:
    """Opens the corpora; one process builds a missing corpus for those that see the same disk."""
    first = hosts.run_on_first("corpus", lambda: open_data(config), limit_seconds=BUILD_SECONDS)
    # All report: a corpus may be damaged on one host alone, whose log must show it too.
    corpora = hosts.run_on_all("corpora", lambda: first or open_data(config), is_printed_by_all=True)
    check_same_data(config, corpora)
    return corpora


def _take_folder(
    config: Config,
    start: SavedStep | None,
    copy: RestoredCopy | None,
    corpora: Mapping[str, Corpus],
    lock: RunLock | None,
    *,
    overwrite: bool,
) -> None:
    step = 0
    if start is not None and start.run_folder == config.run_folder:
        step = start.step
        if copy is None:
            check_same_corpora(start, config, corpora)
        else:
            check_corpora_of_copy(copy.header.corpora, config, corpora)
        for damaged in set_aside_later(config.run_folder, step):
            reason = f"checkpoint {damaged} is damaged; resuming from {step}"
            write_event(config.run_folder, DAMAGED, step=damaged, reason=reason)
    assert lock is not None, "the process that takes the folder holds its lock"
    changed = prepare_folder(config, lock, step=step, overwrite=overwrite)
    save_tokenizer(config.run_folder, config.data, chat_template=_chat_template(config, corpora))
    if changed:
        print(f"run {config.run_folder} resumes with changes: {'; '.join(map(str, changed))}")


def _chat_template(config: Config, corpora: Mapping[str, Corpus]) -> str | None:
    """Returns the template of the chats that a run reads last; None if it reads documents alone."""
    read = (f for phase in config.resolved_phases for f in mixture_of(phase.config.data).folders)
    templates = [corpora[folder].chat_template for folder in read]
    return next((each for each in reversed(templates) if each is not None), None)


def _check_shared(config: Config) -> None:
    """Checks that all processes see the same run folder: each writes its part of a checkpoint there.

    Raises:
      UserError: naming the processes that do not.
    """
    path = pathlib.Path(config.run_folder) / CONFIG_FILE
    text = path.read_text() if path.is_file() else None
    # With 1,024 processes, their texts together would be megabytes.
    is_same = text == hosts.broadcast_from_first("shared folder", text)
    others = hosts.reduce("shared folder", [] if is_same else [hosts.describe(hosts.process())], join)
    if others:
        raise hosts.collective_error(
            f"{', '.join(others)} does not see the {path} of {hosts.describe(0)}; run_folder must be on a "
            "file system that all hosts share"
        )


def open_data(config: Config) -> dict[str, Corpus]:
    """Opens the corpora of a run, building the first if the config describes it, and checks that they fit.

    Returns:
      Corpora by folder, as the config names them.

    Raises:
      UserError: if a corpus cannot be opened or built, or does not fit the run.
    """
    # Before a corpus is built: a token without an embedding row would silently be read as another one.
    _check_rows(ensure_tokenizer(config.data), config)
    corpora = {config.data.corpus: ensure_corpus(config.data)}
    _check_kind(corpora[config.data.corpus], config)
    for phase in config.resolved_phases:
        with in_phase(phase.name):
            data = phase.config.data
            for folder in mixture_of(data).folders:
                if folder not in corpora:
                    corpora[folder] = open_corpus_for(folder, data)
                    _check_kind(corpora[folder], config)
                # For its UserError: a split must have at least one sequence of this phase's length.
                num_sequences(corpora[folder], "train", data.sequence_length)
            num_sequences(corpora[config.data.corpus], "validation", data.sequence_length)
    return corpora


def _check_rows(tokenizer: Tokenizer, config: Config) -> None:
    """Checks that each token has a row in the embedding.

    Raises:
      UserError: if the embedding has too few rows.
    """
    rows, num_tokens = config.model.vocab_size, tokenizer.vocab_size
    if num_tokens <= rows:
        return
    # A corpus of an older version lacks the tokens that files next to the tokenizer.json declare; its runs
    # can be resumed without their rows.
    if pathlib.Path(config.data.corpus).exists() and tokenizer.fingerprint != tokenizer.file_fingerprint:
        corpus = read_manifest(config.data.corpus)
        if corpus.vocab_size <= rows and corpus.tokenizer_fingerprint == tokenizer.file_fingerprint:
            return
    raise UserError(
        f'model.vocab_size is {rows}; data.tokenizer "{config.data.tokenizer}" has {num_tokens} tokens, and '
        "each must have its row. Tokens that files next to the tokenizer.json declare count, as in "
        f"transformers; the rows suffice with --config.model.vocab_size={num_tokens} or more"
    )


def _check_kind(corpus: Corpus, config: Config) -> None:
    """Checks that a run on preferences has a corpus of preferences, and no other run has.

    Raises:
      UserError: for preferences with dpo.beta = 0, and for other text with dpo.beta above 0.
    """
    # Both would train without an error, and learn the wrong thing.
    if corpus.preferences and not config.dpo.beta:
        raise UserError(
            f"dpo.beta is 0, and {corpus.folder} holds preferences, whose rejected answers would be learned "
            "too; set dpo.beta above 0, such as 0.1"
        )
    if config.dpo.beta and not corpus.preferences:
        raise UserError(
            f"dpo.beta is {config.dpo.beta}, and {corpus.folder} holds no preferences; build such "
            "a corpus with zaya data preferences"
        )
    if config.dpo.beta and corpus.unpaired != config.dpo.is_unpaired:
        kinds, option = ("labeled answers", " --unpaired") if config.dpo.is_unpaired else ("pairs", "")
        raise UserError(
            f'dpo.loss_type is "{config.dpo.loss_type}", and {corpus.folder} does not hold {kinds}; build '
            f"such a corpus with zaya data preferences{option}"
        )
