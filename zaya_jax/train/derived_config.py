"""Fields of a config that depend on what a run finds when it starts: its data, and the run in its folder."""

import dataclasses
import math
import pathlib

from zaya_jax.checkpoint import has_record, read_config
from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.data.corpora.ensure import ensure_corpus
from zaya_jax.data.reading.loader import num_sequences
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import CHECKPOINTS_FOLDER, FILES_BEFORE_THE_RUN, LOCK_FILE


def with_base_dtype(config: Config, *, overwrite: bool) -> Config:
    """Names the type of the frozen weights: that of the run in the folder, or of the products.

    The config of a run with adapters always names it, because `execution.dtype` may change when it resumes.

    Args:
      config: config of the run.
      overwrite: whether the run in the folder will be removed.
    """
    if not config.lora.rank or config.lora.base_dtype is not None:
        return config

    def begun() -> str | None:
        held = None if overwrite else find_run_config(pathlib.Path(config.run_folder))
        return None if held is None else held.lora.base_dtype

    # From one process: the others may see the folder later.
    held = hosts.broadcast_from_first("base dtype", hosts.run_on_first("base dtype", begun))
    lora = dataclasses.replace(config.lora, base_dtype=held or config.execution.dtype)
    return dataclasses.replace(config, lora=lora)


def with_schedule(config: Config) -> Config:
    """Derives the schedule of a run from the size of its data: steps, warm-up, and evaluations.

    Args:
      config: config of a run; returned unchanged if it derives nothing. A missing corpus is built.

    Raises:
      UserError: if the corpus cannot be opened or built.
    """
    train, steps = config.train, config.train.num_steps
    if train.epochs is not None:
        corpus = ensure_corpus(config.data)
        length = config.data.sequence_length
        windows = math.ceil(train.epochs * num_sequences(corpus, "train", length))
        steps = config.data.steps_for(windows * length)
        train = dataclasses.replace(train, num_steps=steps)
    if train.evaluations is not None:
        # The last interval may be shorter, because a run always ends with an evaluation.
        every = math.ceil(steps / train.evaluations)
        train = dataclasses.replace(train, eval_every=every, checkpoint_every=every)
    optimizer, fraction = config.optimizer, config.optimizer.warmup_fraction
    if fraction is not None:
        optimizer = dataclasses.replace(optimizer, warmup_steps=int(fraction * steps))
    return dataclasses.replace(config, train=train, optimizer=optimizer)


def find_run_config(folder: pathlib.Path) -> Config | None:
    """Reads the config of the run in a folder; returns None if the folder is empty or missing.

    Raises:
      UserError: if the folder holds something else than a run.
    """
    for path in (folder / CHECKPOINTS_FOLDER, folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise UserError(
                f"run_folder is {folder}, and {path} is a file; it must be a folder or not exist yet"
            )
    # A kill may leave nothing but a lock and an unfinished config: the same command can then start again.
    unfinished = {LOCK_FILE, CONFIG_FILE + durable.PARTIAL, *FILES_BEFORE_THE_RUN}
    if not folder.exists() or {path.name for path in folder.iterdir()} <= unfinished:
        return None
    if not (folder / CONFIG_FILE).is_file() and not has_record(folder):
        raise UserError(f"{folder} is not empty and not a run folder; choose another --config.run_folder")
    # Read also before it is removed: folders of other programs, such as Hugging Face's, have a config.json.
    return read_config(folder)
