"""Predictions of a teacher, computed once for all windows of a run and stored in its folder.

Like the references of preferences (`zaya_jax.train.reference_logprobs`), they never change: a pass before
the first step writes parts, and after a kill it continues with the missing ones. No step holds the teacher.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax

from zaya_jax.checkpoint import SavedStep, identity_of, read_config, require_step
from zaya_jax.config import Config
from zaya_jax.data.reading.loader import Share, evaluation_batches
from zaya_jax.data.tokenizers.saved_tokenizer import with_saved_tokenizer
from zaya_jax.data.tokenizers.tokenizer import tokenizer_of
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import read_json
from zaya_jax.parallel.mesh import local_rows, place_rows
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import TEACHER_FILE, TEACHER_FOLDER
from zaya_jax.train.compiled_programs import teacher_program
from zaya_jax.train.heartbeats import EVALUATE, Heartbeats
from zaya_jax.train.hooks.progress import QUIET_SECONDS
from zaya_jax.train.reference_logprobs import WindowRange, parts_of
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.starting_state import fresh_state
from zaya_jax.train.teacher.storage import DAMAGED, StoredPredictions, WindowRecord, is_complete

Predictions = dict[tuple[str, str], StoredPredictions]
"""Predictions by corpus folder and split."""


def compute_predictions(run: PreparedRun, heartbeats: Heartbeats) -> Predictions:
    """Computes the missing predictions of a new run, and opens all of them.

    Args:
      run: run with a teacher. Its own state must not exist yet, so that both need not fit in memory.
      heartbeats: heartbeats of this process.

    Raises:
      UserError: if the teacher has no weights, or another tokenizer or vocabulary.
    """
    saved = SavedStep(
        *hosts.broadcast_from_first("teacher", hosts.run_on_first("teacher", lambda: _find(run)))
    )
    parts, record = parts_of(run), _record(run, _identity(run, saved))
    missing = hosts.broadcast_from_first(
        "missing predictions", hosts.run_on_first("predictions", lambda: _begin(run, saved, parts, record))
    )
    # A resumed pass computes what is missing; most starts of a run find everything.
    if missing:
        _compute(run, saved, [parts[number] for number in missing], record, heartbeats)
    return load_predictions(run)


def load_predictions(run: PreparedRun) -> Predictions:
    """Opens the predictions of a resumed run.

    Raises:
      DamagedError: if a part is missing or incomplete. Damaged windows are reported when they are read.
    """
    return hosts.run_on_all("predictions", lambda: _load(run))


def _load(run: PreparedRun) -> Predictions:
    folder, by_split = _folder(run), {}
    identity = _stored_identity(folder)
    record = _record(run, identity or "")
    for part in parts_of(run):
        if identity is None or not is_complete(folder, part, record):
            raise DamagedError(f"{folder / part.file}, the teacher's predictions, are {DAMAGED}")
        by_split.setdefault((part.corpus, part.split), []).append(part)
    return {split: StoredPredictions(folder, parts, record) for split, parts in by_split.items()}


def _find(run: PreparedRun) -> tuple[str, int]:
    """Finds the teacher's newest weights, and checks that it reads the same tokens."""
    # Before the weights are read, which may take minutes.
    teacher, config = str(run.config.distillation.teacher), run.config
    other = read_config(teacher)
    if other.model.vocab_size != config.model.vocab_size:
        raise UserError(
            f"distillation.teacher: {teacher} has model.vocab_size {other.model.vocab_size}, and this run "
            f"{config.model.vocab_size}; both must predict the same tokens"
        )
    fingerprint = tokenizer_of(with_saved_tokenizer(teacher, other.data)).fingerprint
    if fingerprint != run.corpus.tokenizer_fingerprint:
        raise UserError(
            f"distillation.teacher: {teacher} has another tokenizer than {run.corpus.folder}; both must have "
            "the same one, because the teacher's predictions are stored by token"
        )
    if config.distillation.top_k > config.model.vocab_size:
        raise UserError(
            f"distillation.top_k is {config.distillation.top_k}; it must be at most model.vocab_size, "
            f"{config.model.vocab_size}"
        )
    return teacher, require_step(teacher, weights_only=True)


def _identity(run: PreparedRun, saved: SavedStep) -> str:
    # The settings decide what is stored, so others need another pass.
    settings = run.config.distillation
    weights = hosts.broadcast_from_first(
        "teacher's identity",
        hosts.run_on_first("identity", lambda: identity_of(saved.run_folder, saved.step)),
    )
    return f"{weights} {settings.top_k} {settings.temperature}"


def _stored_identity(folder: pathlib.Path) -> str | None:
    try:
        return read_json(folder / TEACHER_FILE).get("identity")
    except ValueError:
        return None


def _folder(run: PreparedRun) -> pathlib.Path:
    return pathlib.Path(run.config.run_folder) / TEACHER_FOLDER


def _record(run: PreparedRun, identity: str) -> WindowRecord:
    config = run.config
    dtype = np.dtype("<u2" if config.model.vocab_size <= 2**16 else "<u4")
    return WindowRecord(config.data.sequence_length, config.distillation.top_k, dtype, identity)


def _begin(
    run: PreparedRun, saved: SavedStep, parts: Sequence[WindowRange], record: WindowRecord
) -> list[int]:
    """Prepares the folder for the teacher; returns the indices of missing parts."""
    folder = _folder(run)
    if folder.exists() and _stored_identity(folder) != record.identity:  # of another teacher
        durable.remove_folder(folder)
    durable.make_folder(folder)
    about = {"identity": record.identity, "teacher": saved.run_folder, "step": saved.step}
    durable.write(folder / TEACHER_FILE, json.dumps(about, indent=2) + "\n")
    return [number for number, part in enumerate(parts) if not is_complete(folder, part, record)]


def _teacher_run(run: PreparedRun, saved: SavedStep) -> PreparedRun:
    """Returns a run that holds the teacher's weights and no optimizer state, on the devices of the run."""
    # Rows are whole on each device, so that all predictions of a window are in one place. Mixtures and ramps
    # only order the windows, which the pass reads in the order of the corpus.
    execution = dataclasses.replace(run.config.execution, context_devices=1)
    data = dataclasses.replace(run.config.data, mixtures=(), mixture=None, batch_ramp=())
    config = Config(model=read_config(saved.run_folder).model, data=data, execution=execution)
    extensions = dataclasses.replace(run.extensions, optimizer=lambda schedule: optax.identity())
    return dataclasses.replace(run, config=config, start=saved, extensions=extensions)


def _compute(
    run: PreparedRun,
    saved: SavedStep,
    parts: Sequence[WindowRange],
    record: WindowRecord,
    heartbeats: Heartbeats,
) -> None:
    """Computes and writes parts, one after the other."""
    teacher = _teacher_run(run, saved)
    state, setup = fresh_state(teacher, heartbeats), teacher.setup(teacher.config)
    program = teacher_program(state, setup=setup, mesh=run.mesh, config=run.config.distillation)
    # The size of a microbatch, for which memory is sized, in whole rows of each device.
    rows = run.config.data.batch_size // run.config.execution.num_microbatches
    batch_size = -(-rows // run.mesh.size) * run.mesh.size
    total, done, last_line = sum(part.num_windows for part in parts), 0, time.monotonic()
    if hosts.is_first():
        print(f"teacher: {total:,} windows under the weights of {saved.run_folder}, step {saved.step}")
    for part in parts:
        batches = evaluation_batches(
            run.corpora[part.corpus],
            split=part.split,
            sequence_length=run.config.data.sequence_length,
            batch_size=batch_size,
            first=part.first,
            limit=part.num_windows,
            share=Share(local_rows(run.mesh, batch_size)),
        )
        # Encoded at once: as arrays, the predictions of a part would need more memory.
        windows: list[bytes] = []
        for batch in run.extensions.of_batches(batches):
            heartbeats.enter(EVALUATE, 0)
            results = jax.device_get(program(state, place_rows(batch, run.mesh)))
            windows += [
                record.encode(tokens_TK, log_probs_TK, f"{part.file} {len(windows) + i}")
                for i, (tokens_TK, log_probs_TK) in enumerate(zip(*results, strict=True))
            ]
        # The last batch is padded with rows after the end of the part.
        if hosts.is_first():
            durable.write(_folder(run) / part.file, b"".join(windows[: part.num_windows]))
        done += part.num_windows
        if hosts.is_first() and time.monotonic() - last_line >= QUIET_SECONDS:
            print(f"teacher: {done:,} of {total:,} windows")
            last_line = time.monotonic()
    # Other processes may open the files only when the first one has written them.
    hosts.run_on_first("teacher written", lambda: None)
