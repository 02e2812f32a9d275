"""The folder of a run before it starts: checks that it can be used, finds the checkpoint to start from."""

import pathlib

from zaya_jax.checkpoint import (
    RunLock,
    SavedStep,
    Verify,
    check_init_from,
    config_loss,
    damage_of,
    has_record,
    newest_step,
    read_config,
)
from zaya_jax.config import CONFIG_FILE, Config, FieldChange, differences, is_inside, resume_errors
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.train.consistency.config_changes import record_change
from zaya_jax.train.derived_config import find_run_config
from zaya_jax.train.metrics.files import check_metric_paths


def check_folder(
    config: Config,
    *,
    overwrite: bool,
    change_course: bool = False,
    copied: int | None = None,
    verify: Verify = damage_of,
) -> SavedStep | None:
    """Checks that a run can use its folder, and finds the checkpoint to start from.

    Args:
      config: config of the run.
      overwrite: whether to remove what the folder holds.
      change_course: whether a resumed run may have other learning rates, decays or lengths.
      copied: step that peers can restore; checkpoints up to it are not read. None without copies.
      verify: see `newest_step`.

    Returns:
      The run's newest complete checkpoint or `copied`, or that of `train.init_from`; None for fresh weights.

    Raises:
      UserError: if the folder holds a run that cannot be resumed with this config, or something else than a
        run, or data that the run reads.
    """
    folder = pathlib.Path(config.run_folder)
    existing = find_run_config(folder)
    held = None if overwrite else existing
    if held is not None:
        check_metric_paths(folder)
    step = copied
    if held is not None and (newest := newest_step(folder, after=copied, verify=verify)) is not None:
        step = newest
    refused = (
        [] if held is None else resume_errors(config, held, newest_step=step, change_course=change_course)
    )
    if held is None or refused:
        _check_apart(config)
    if overwrite:
        _check_nothing_is_lost(config)
    elif refused:
        raise UserError(
            f"{folder} holds a run of another config; {'; '.join(refused[:3])}; choose another "
            "--config.run_folder, or give --overwrite to remove the old run"
        )
    if step is not None:  # a resumed run has its weights from its own checkpoint
        return SavedStep(config.run_folder, step)
    if config.train.init_from is not None:
        return check_init_from(config.train.init_from, config.model, verify=verify)
    return None


def _check_apart(config: Config) -> None:
    """Refuses a run folder that contains the initial weights, or that is inside their folder."""
    weights, folder = config.train.init_from, config.run_folder
    if weights is not None and (is_inside(weights, folder) or is_inside(folder, weights)):
        raise UserError(
            f"train.init_from is {weights} and run_folder {folder}; they must be two folders, neither in the "
            "other: give the new run its own, --config.run_folder=ANOTHER"
        )


def _check_nothing_is_lost(config: Config) -> None:
    """Refuses to remove a run folder together with data that the run reads."""
    data = config.data
    read = [("data.corpus", data.corpus), ("data.tokenizer", data.tokenizer), ("data.source", data.source)]
    read += [(f"data.mixtures.{m.name}.corpora", corpus) for m in data.mixtures for corpus in m.corpora]
    for name, path in read:
        if path not in (None, "byte", "stdlib") and is_inside(path, config.run_folder):
            raise UserError(
                f"{name} has {path}, which is in the run folder {config.run_folder}; --overwrite would "
                "remove it, so choose another --config.run_folder"
            )


def prepare_folder(config: Config, lock: RunLock, *, step: int, overwrite: bool) -> list[FieldChange]:
    """Writes the config to a run folder that `check_folder` accepted, and records changes of a resumed run.

    Args:
      config: config of the run.
      lock: lock of its folder.
      step: step to resume from.
      overwrite: whether to remove what the folder holds.

    Returns:
      Changed config fields of a resumed run.
    """
    folder = lock.folder
    if (folder / CONFIG_FILE).is_file() or has_record(folder):
        if not overwrite:
            held, is_lost = read_config(folder), config_loss(folder) is not None
            changed = differences(config, held)
            if changed:
                # The record first: after a crash there must be no changed config without a record.
                has_left = bool(resume_errors(config, held, newest_step=step))
                record_change(folder, changed, step=step, has_left_its_course=has_left)
            # If the config was lost, the checkpoint's record is its only copy, and retention removes that.
            if changed or is_lost:
                durable.write(folder / CONFIG_FILE, config.to_text())
            return changed
        lock.empty_folder()  # atomic: a folder without its config would be no run folder after a crash
    durable.write(folder / CONFIG_FILE, config.to_text())
    return []
