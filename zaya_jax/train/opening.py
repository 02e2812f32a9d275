"""What a run needs before it begins: its corpora and a folder that is its own."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from zaya_jax import durable
from zaya_jax.aegis.heartbeats import RESTORE, Heartbeats
from zaya_jax.aegis.journal import BESIDE, DAMAGED, write_event
from zaya_jax.checkpoint import (
    FOLDER,
    LOCK_FILE,
    RunLock,
    SavedStep,
    check_init_from,
    newest_step,
    read_config,
    set_aside_later,
)
from zaya_jax.config import CONFIG_FILE, Config, FieldChange, differences, in_phase, lies_in, refusals
from zaya_jax.data.batch import Batch
from zaya_jax.data.ensure import ensure_corpus, ensure_tokenizer, open_corpus_for
from zaya_jax.data.kept_tokenizer import keep_files
from zaya_jax.data.loader import Reference, Share, num_sequences
from zaya_jax.data.mixture import mixture_of
from zaya_jax.data.shards import Corpus, Split
from zaya_jax.data.tokenizer import Tokenizer, tokenizer_of
from zaya_jax.model.adapters import declare_run
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import local_rows, local_tokens, with_context
from zaya_jax.train.changes import record_change
from zaya_jax.train.extensions import NONE, Extensions
from zaya_jax.train.metrics import check_places, text_bytes
from zaya_jax.train.passed_over import NOTHING_PASSED_OVER, PassedOver, read_passed_over
from zaya_jax.train.phases import check_devices
from zaya_jax.train.provenance import Provenance, check_same_corpora, fingerprints
from zaya_jax.train.state import TrainSetup, make_setup

References = Mapping[tuple[str, str], Reference]
"""By folder and split."""
VERIFY_SECONDS = 4 * 3600.0
"""That others wait for the process which reads every byte of the newest checkpoint, and of older ones if that
is damaged: of 1 TB, at 100 MB/s, for three hours."""
BUILD_SECONDS = 24 * 3600.0
"""That others wait for the process which builds a corpus."""


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """All that stays the same while a run goes on."""

    config: Config
    corpora: dict[str, Corpus]
    """By folder; those of all phases, and the one that is held out."""
    token_bytes_V: np.ndarray
    mesh: Mesh
    schedule: optax.Schedule
    start: SavedStep | None
    """The checkpoint that it begins from, its own or another run's; None for fresh weights."""
    provenance: Provenance
    """What its checkpoints say of it."""
    extensions: Extensions = NONE
    passed_over: PassedOver = NOTHING_PASSED_OVER
    """Steps that teach nothing."""
    references: References = dataclasses.field(default_factory=dict)
    """What the weights that it started from give answers, where preferences are learned."""

    @property
    def corpus(self) -> Corpus:
        """Whose held-out split is scored."""
        return self.corpora[self.config.data.corpus]

    @property
    def num_tokens(self) -> dict[str, int]:
        """Of the training split of each corpus, by folder."""
        return {folder: corpus.train.tokens for folder, corpus in self.corpora.items()}

    @property
    def training_references(self) -> dict[str, Reference]:
        """Of the training splits, by folder."""
        return {folder: found for (folder, split), found in self.references.items() if split == "train"}

    @property
    def held_out_reference(self) -> Reference | None:
        """Of the split that is scored."""
        return self.references.get((self.config.data.corpus, "validation"))

    def mesh_of(self, config: Config) -> Mesh:
        """The devices in a phase, of which this is the config: as many as it says share a sequence."""
        return with_context(self.mesh, config.execution.context_devices)

    def share_of(self, config: Config, batch_size: int) -> Share:
        """What this process reads of a phase's batches of some size."""
        mesh = self.mesh_of(config)
        return Share(local_rows(mesh, batch_size), local_tokens(mesh, config.data.sequence_length))

    def setup(self, config: Config) -> TrainSetup:
        """What moves the state in a phase, of which this is the config."""
        return make_setup(config, self.mesh.size, self.schedule, optimizer=self.extensions.optimizer)

    def text_bytes(self, batch: Batch) -> float:
        """Bytes of text that a batch's targets stand for; of pairs of answers, those of the chosen ones."""
        weights_BT = np.asarray(batch.weights_BT)
        # The chosen sides are the odd segments; a rejected one is no text that the model is to give.
        if self.config.dpo.beta:
            weights_BT = weights_BT * (np.asarray(batch.segments_BT) % 2)
        return text_bytes(np.asarray(batch.targets_BT), weights_BT, self.token_bytes_V)


def open_run(
    config: Config,
    mesh: Mesh,
    lock: RunLock | None,
    *,
    heartbeats: Heartbeats,
    overwrite: bool,
    change_course: bool = False,
) -> OpenRun:
    """Checks all that can be checked of a run, opens its corpora and makes its folder.

    Args:
      config: of the run.
      mesh: all devices.
      lock: of the run folder; None in all processes but the first.
      heartbeats: of this process, which say how long a checkpoint is verified.
      overwrite: throws away what the run folder holds.
      change_course: as `train`.

    Raises:
      ValueError: for whatever cannot work, before anything is compiled.
    """
    hosts.together("config", lambda: _check_config(config, mesh))
    # Before minutes go into a corpus. One looks, so that all go on from the same step.
    # Every byte is read, hours of it in a large run: whoever reads the goodput is to see where they went.
    with heartbeats.within(RESTORE):
        found = hosts.first_does(
            "run folder",
            lambda: check_folder(config, overwrite=overwrite, change_course=change_course),
            limit_seconds=VERIFY_SECONDS,
        )
    start = _saved_step(hosts.from_first("start", found and dataclasses.astuple(found)))
    corpora = _open_data_in_turn(config)
    # Last: what was refused has left the old run alone.
    hosts.first_does("folder", lambda: _take_folder(config, start, corpora, lock, overwrite=overwrite))
    _check_shared(config)
    tokenizer, held_out = tokenizer_of(config.data), corpora[config.data.corpus].validation
    # As long as the embedding, which may have rows that no token of the tokenizer has.
    token_bytes_V = np.zeros(config.model.vocab_size)
    token_bytes_V[: tokenizer.vocab_size] = _token_bytes(tokenizer, held_out)
    provenance = Provenance(config, fingerprints(corpora), mesh.size)
    # Behind the folder's taking: of a run that was thrown away nothing is passed over. As the first one reads
    # it, for a step that one process passes over and another does not would part them for good.
    ranges = hosts.first_does("passed over", lambda: read_passed_over(config.run_folder).ranges)
    passed_over = PassedOver(tuple(map(tuple, hosts.from_first("passed over", ranges))))
    return OpenRun(
        config=config,
        corpora=corpora,
        token_bytes_V=token_bytes_V,
        mesh=mesh,
        schedule=learning_rate_schedule(config),
        start=start,
        provenance=provenance,
        passed_over=passed_over,
    )


def _check_config(config: Config, mesh: Mesh) -> None:
    check_devices(config, mesh.size)
    for phase in config.resolved_phases:
        with in_phase(phase.name):
            with_context(mesh, phase.config.execution.context_devices)
    declare_run(config)  # for its ValueError: patterns of weights must match some


def _token_bytes(tokenizer: Tokenizer, held_out: Split) -> np.ndarray:
    """Bytes of text that each token stands for, [V]."""
    known_V = tokenizer.token_bytes()
    if known_V is not None:
        return known_V
    borders = tokenizer.borders
    # Borders are no text, and no document's share.
    between = len(borders.opening) + held_out.documents * len(borders.lay_out([]))
    # So the whole split's bytes add up, whatever each of its tokens stands for.
    mean = held_out.text_bytes / (held_out.tokens - between)
    if hosts.is_first():
        print(
            f"tokens of {tokenizer.name} do not tell their bytes: in bits/byte each counts as {mean:.2f}, "
            "the mean of the held-out texts, of which case, spaces and unknown characters may be lost"
        )
    bytes_V = np.full(tokenizer.vocab_size, mean)
    bytes_V[[borders.first_id, borders.eos_id]] = 0
    return bytes_V


def _saved_step(found: Sequence[Any] | None) -> SavedStep | None:
    return None if found is None else SavedStep(*found)


def _open_data_in_turn(config: Config) -> dict[str, Corpus]:
    """`open_data`, where one process builds a corpus that is not there for those which see the same disk."""
    first = hosts.first_does("corpus", lambda: open_data(config), limit_seconds=BUILD_SECONDS)
    return hosts.together("corpora", lambda: first or open_data(config))


def _take_folder(
    config: Config,
    start: SavedStep | None,
    corpora: Mapping[str, Corpus],
    lock: RunLock | None,
    *,
    overwrite: bool,
) -> None:
    step = 0
    if start is not None and start.run_folder == config.run_folder:
        step = start.step
        check_same_corpora(start, config, corpora)
        for damaged in set_aside_later(config.run_folder, step):
            reason = f"checkpoint {damaged} is not what was written; going on from {step}"
            write_event(config.run_folder, DAMAGED, step=damaged, reason=reason)
    assert lock is not None, "whoever takes the folder holds its lock"
    changed = prepare_folder(config, lock, step=step, overwrite=overwrite)
    keep_files(config.run_folder, config.data, chat_template=_chat_template(config, corpora))
    if changed:
        print(f"run {config.run_folder} goes on otherwise than before: {'; '.join(map(str, changed))}")


def _chat_template(config: Config, corpora: Mapping[str, Corpus]) -> str | None:
    """That of the chats that a run reads last; None for one on documents alone."""
    read = (f for phase in config.resolved_phases for f in mixture_of(phase.config.data).folders)
    templates = [corpora[folder].chat_template for folder in read]
    return next((each for each in reversed(templates) if each is not None), None)


def _check_shared(config: Config) -> None:
    """All write their part of a checkpoint into one folder, which each must see as the first one left it.

    Raises:
      ValueError: if some do not.
    """
    path = pathlib.Path(config.run_folder) / CONFIG_FILE
    seen = hosts.gather("shared folder", path.read_text() if path.is_file() else None)
    others = [hosts.describe(number) for number, text in enumerate(seen) if text != seen[0]]
    if others:
        raise hosts.shared(
            f"{', '.join(others)} does not see the {path} of {hosts.describe(0)}; run_folder must be on a "
            "file system that all hosts share"
        )


def open_data(config: Config) -> dict[str, Corpus]:
    """Opens the corpora of a run, building the first where that is asked for, and checks that the run fits.

    Returns:
      By folder, as the config names them.

    Raises:
      ValueError: if one cannot be had or does not fit.
    """
    # Checked before a corpus is built: a token without a row would be read as another, without a word.
    vocab_size = ensure_tokenizer(config.data).vocab_size
    if vocab_size > config.model.vocab_size:
        raise ValueError(
            f'model.vocab_size is {config.model.vocab_size}; data.tokenizer "{config.data.tokenizer}" has '
            f"{vocab_size} tokens, and each must have its row"
        )
    corpora = {config.data.corpus: ensure_corpus(config.data)}
    _check_kind(corpora[config.data.corpus], config)
    for phase in config.resolved_phases:
        with in_phase(phase.name):
            data = phase.config.data
            for folder in mixture_of(data).folders:
                if folder not in corpora:
                    corpora[folder] = open_corpus_for(folder, data)
                    _check_kind(corpora[folder], config)
                # For its ValueError: a split must have one whole sequence of this phase's length.
                num_sequences(corpora[folder], "train", data.sequence_length)
            num_sequences(corpora[config.data.corpus], "validation", data.sequence_length)
    return corpora


def _check_kind(corpus: Corpus, config: Config) -> None:
    """What is learned must be what the corpus holds.

    Raises:
      ValueError: for pairs of answers that would be learned alike, and for other text without a pair.
    """
    # Both would train without an error, and learn what nobody wants.
    if corpus.preferences and not config.dpo.beta:
        raise ValueError(
            f"dpo.beta is 0, and {corpus.folder} holds preferences, of which the rejected answers would be "
            "learned too; it must be above 0, such as 0.1"
        )
    if config.dpo.beta and not corpus.preferences:
        raise ValueError(
            f"dpo.beta is {config.dpo.beta}, and {corpus.folder} holds no preferences; zaya data preferences "
            "makes a corpus of them"
        )


def check_folder(config: Config, *, overwrite: bool, change_course: bool = False) -> SavedStep | None:
    """Checks that a run can have its folder, and finds the checkpoint that it is to start from.

    Args:
      config: of the run.
      overwrite: as `train`.
      change_course: as `train`.

    Returns:
      The newest of its own that is whole, or of `train.init_from`; None for fresh weights.

    Raises:
      ValueError: if the folder holds a run that cannot go on with this config, or something that is no
        run; or if the run reads what lies in it.
    """
    folder = pathlib.Path(config.run_folder)
    found = read_held(folder)
    held = None if overwrite else found
    if held is not None:
        check_places(folder)
    step = None if held is None else newest_step(folder)
    refused = [] if held is None else refusals(config, held, newest_step=step, change_course=change_course)
    if held is None or refused:
        _check_apart(config)
    if overwrite:
        _check_nothing_is_lost(config)
    elif refused:
        raise ValueError(
            f"{folder} holds a run of another config; {'; '.join(refused[:3])}; choose another "
            "--config.run_folder, or give --overwrite to throw the old run away"
        )
    if step is not None:  # a run that goes on has its weights from its checkpoint
        return SavedStep(config.run_folder, step)
    if config.train.init_from is not None:
        return check_init_from(config.train.init_from, config.model)
    return None


def read_held(folder: pathlib.Path) -> Config | None:
    """The config of the run that a folder holds; None where there is nothing.

    Raises:
      ValueError: if it holds something that is no run.
    """
    for path in (folder / FOLDER, folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(
                f"run_folder is {folder}, and {path} is a file; it must be a folder or not exist yet"
            )
    # A kill can leave nothing but a lock and a config in the making: the same command goes on.
    in_the_making = {LOCK_FILE, CONFIG_FILE + durable.PARTIAL, *BESIDE}
    if not folder.exists() or {path.name for path in folder.iterdir()} <= in_the_making:
        return None
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} is not empty and not a run folder; choose another --config.run_folder")
    # Read also when it is to go: others' folders, Hugging Face's too, have a config.json.
    return read_config(folder)


def _check_apart(config: Config) -> None:
    """A run that starts from weights must neither write beside them nor, one day, be removed with them."""
    weights, folder = config.train.init_from, config.run_folder
    if weights is not None and (lies_in(weights, folder) or lies_in(folder, weights)):
        raise ValueError(
            f"train.init_from is {weights} and run_folder {folder}; they must be two folders, neither in the "
            "other: give the new run its own, --config.run_folder=ANOTHER"
        )


def _check_nothing_is_lost(config: Config) -> None:
    """Refuses to throw away a run folder together with what the run reads."""
    data = config.data
    read = [("data.corpus", data.corpus), ("data.tokenizer", data.tokenizer), ("data.source", data.source)]
    read += [(f"data.mixtures.{m.name}.corpora", corpus) for m in data.mixtures for corpus in m.corpora]
    for name, path in read:
        if path not in (None, "byte", "stdlib") and lies_in(path, config.run_folder):
            raise ValueError(
                f"{name} has {path}, which lies in the run folder {config.run_folder}; --overwrite would "
                "remove it, so choose another --config.run_folder"
            )


def prepare_folder(config: Config, lock: RunLock, *, step: int, overwrite: bool) -> list[FieldChange]:
    """Fills the run folder that `check_folder` found fit, or has one of the same run say how it goes on.

    Args:
      config: of the run.
      lock: of its folder.
      step: that it goes on from.
      overwrite: throws away what the folder holds.

    Returns:
      What the run has otherwise from now on.
    """
    folder = lock.folder
    if (folder / CONFIG_FILE).is_file():
        if not overwrite:
            held = read_config(folder)
            changed = differences(config, held)
            if changed:
                # First: a config that is another, with no word of it, is what must not be found.
                has_left = bool(refusals(config, held, newest_step=step))
                record_change(folder, changed, step=step, has_left_its_course=has_left)
                durable.write(folder / CONFIG_FILE, config.to_text())
            return changed
        lock.empty_folder()  # at once: one without its config, killed here, would be no run folder
    durable.write(folder / CONFIG_FILE, config.to_text())
    return []
