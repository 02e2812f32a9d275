"""What a run needs before it begins: its corpora, and a folder that is its own."""

import pathlib

from zaya_jax import durable
from zaya_jax.checkpoint import FOLDER, check_init_from, newest_step, read_config
from zaya_jax.config import CONFIG_FILE, Config, differences, in_phase, lies_in
from zaya_jax.data.corpus import ensure_corpus, open_corpus_for
from zaya_jax.data.loader import num_sequences
from zaya_jax.data.mixture import mixture_of
from zaya_jax.data.shards import Corpus
from zaya_jax.data.tokenizer import load_tokenizer


def open_data(config: Config) -> dict[str, Corpus]:
    """Opens the corpora of a run, building the first where that is asked for, and checks that the run fits.

    Returns:
      By folder, as the config names them.

    Raises:
      ValueError: if one cannot be had or does not fit.
    """
    vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    if vocab_size > config.model.vocab_size:
        raise ValueError(
            f'model.vocab_size is {config.model.vocab_size}; data.tokenizer "{config.data.tokenizer}" has '
            f"{vocab_size} tokens, and each must have its row"
        )
    corpora = {config.data.corpus: ensure_corpus(config.data)}
    for phase in config.resolved_phases:
        with in_phase(phase.name):
            data = phase.config.data
            for folder in mixture_of(data).folders:
                if folder not in corpora:
                    corpora[folder] = open_corpus_for(folder, data.tokenizer)
                num_sequences(corpora[folder], "train", data.sequence_length)
            num_sequences(corpora[config.data.corpus], "validation", data.sequence_length)
    return corpora


def check_folder(config: Config, *, overwrite: bool) -> None:
    """Checks that a run can have its folder, and can start from the weights that it is to start from.

    Raises:
      ValueError: if the folder holds a run of another config, or something that is no run; or if the
        run reads what lies in it.
    """
    folder = pathlib.Path(config.run_folder)
    for path in (folder / FOLDER, folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(
                f"run_folder is {folder}, and {path} is a file; it must be a folder or not exist yet"
            )
    held = _read_held(folder)
    changed = differences(config, held) if held is not None else []
    if held is None or changed or overwrite:
        _check_apart(config)
    if overwrite:
        _check_nothing_is_lost(config)
    elif changed:
        raise ValueError(
            f"{folder} holds a run of another config ({'; '.join(changed[:3])}); choose another "
            "--config.run_folder, or give --overwrite to throw the old run away"
        )
    starts_anew = overwrite or newest_step(folder) is None
    if starts_anew and config.train.init_from is not None:  # later it may be gone
        check_init_from(config.train.init_from, config.model)


def _read_held(folder: pathlib.Path) -> Config | None:
    """The config of the run that a folder holds; None where there is nothing."""
    # A kill can leave nothing but a config in the making: the same command goes on.
    in_the_making = {CONFIG_FILE + durable.PARTIAL}
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


def prepare_folder(config: Config, *, overwrite: bool) -> None:
    """Makes the run folder that `check_folder` found fit; one of the same run is left as it is."""
    folder = pathlib.Path(config.run_folder).resolve()  # a link to it stays
    if (folder / CONFIG_FILE).is_file():
        if not overwrite:
            return
        durable.remove_folder(folder)  # at once: one without its config, killed here, would be no run folder
    durable.make_folder(folder)
    durable.write(folder / CONFIG_FILE, config.to_text())
