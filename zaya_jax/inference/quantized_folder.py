"""A folder of quantized PyTorch weights instead of a run: experts stay quantized in memory.

Its tokenizer and chat template are next to the weights, as `zaya convert --quantize` and releases on the
Hugging Face hub have them.
"""

import pathlib

from zaya_jax.checkpoint import SavedRun
from zaya_jax.config import Config, DataConfig
from zaya_jax.convert.pytorch.folder import CONFIG, PytorchFolder, PytorchWeights, open_folder
from zaya_jax.convert.quantized.device_weights import load_quantized_variables
from zaya_jax.convert.quantized.schemes import quantization_section
from zaya_jax.convert.stream import execution_of
from zaya_jax.data.tokenizers.tokenizer_files import TOKENIZER
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json


def is_quantized(folder: str) -> bool:
    """Whether a folder has a config.json of quantized PyTorch weights."""
    file = pathlib.Path(folder) / CONFIG
    if not file.is_file():
        return False
    try:
        values = read_json(file)
    # A damaged config is that of a run, which may have a copy of it in a checkpoint.
    except UserError:
        return False
    # Only the config of a run has this field.
    return "run_folder" not in values and quantization_section(values) is not None


def config_of(folder: str) -> Config:
    """A config for a folder with quantized weights.

    Raises:
      UserError: if the folder is damaged or not supported, or has no tokenizer.
    """
    opened = open_folder(folder)
    with PytorchWeights(opened) as weights:
        return _config(opened, weights)


def load(folder: str) -> SavedRun:
    """Loads a folder with quantized weights onto the first device of this process.

    Raises:
      UserError: as `config_of` and `load_quantized_variables`.
    """
    opened = open_folder(folder)
    with PytorchWeights(opened) as weights:
        config = _config(opened, weights)
        # Weights from PyTorch have no step.
        return SavedRun(config, 0, load_quantized_variables(weights, config.execution.dtype))


def _config(opened: PytorchFolder, weights: PytorchWeights) -> Config:
    tokenizer = opened.folder / TOKENIZER
    if not tokenizer.is_file():
        raise UserError(
            f"{opened.folder} has no {TOKENIZER}; copy it there from the model that was quantized"
        )
    # A folder does not say how long its training sequences were.
    length = min(DataConfig.sequence_length, opened.config.max_position_embeddings)
    return Config(
        run_folder=str(opened.folder),
        model=opened.config,
        data=DataConfig(tokenizer=str(tokenizer), source=None, sequence_length=length),
        execution=execution_of(weights),
    )
