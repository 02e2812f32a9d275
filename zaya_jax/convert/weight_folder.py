"""Opens a folder of weights and detects whether it is a run folder or a PyTorch folder."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.checkpoint import WeightsKind, config_loss, has_record
from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.convert import companion_files as beside
from zaya_jax.convert.companion_files import Companions
from zaya_jax.convert.output_files import TargetLayout
from zaya_jax.convert.pytorch.folder import CONFIG, PytorchFolder, PytorchWeights, check_files, open_folder
from zaya_jax.convert.run_weights import RunWeights
from zaya_jax.convert.stream import Source
from zaya_jax.errors import UserError
from zaya_jax.files.hub import is_hub_id
from zaya_jax.files.json_files import read_json
from zaya_jax.run_folder.names import TOKENIZER_FOLDER


@dataclasses.dataclass(frozen=True)
class WeightFolder:
    """An open folder of weights: the input or the output of a conversion.

    Attributes:
      layout: layout of the weights.
      source: the weights.
      run: config of the run; None for a PyTorch folder.
      step: step of the checkpoint; 0 for a PyTorch folder.
      pytorch: description of the PyTorch folder; None for a run.
      folder: path of the folder.
      weights: which weights of a run these are.
    """

    layout: TargetLayout
    source: Source
    run: Config | None
    step: int
    pytorch: PytorchFolder | None
    folder: pathlib.Path
    weights: WeightsKind = "raw"

    def companions(self) -> Companions:
        """Reads the files that accompany the weights."""
        if self.pytorch is not None:
            return beside.of_folder(self.pytorch)
        assert self.run is not None
        return beside.of_run(self.folder, self.run, step=self.step, weights=self.weights)


@contextlib.contextmanager
def open_weight_folder(path: str | pathlib.Path, weights: WeightsKind = "raw") -> Iterator[WeightFolder]:
    """Opens a run folder, or a PyTorch folder of either layout.

    Args:
      path: path of the folder, or the id of a model on the Hugging Face hub, which is downloaded.
      weights: weights of a run to read, "raw" or their average, "ema".

    Raises:
      UserError: if it is neither, or damaged, or has no average.
    """
    folder = pathlib.Path(path)
    # A path of an existing folder is not a hub id.
    if not is_hub_id(str(path)):
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {problem}; give the folder of a run or of PyTorch weights")
        if is_run(folder):
            source = RunWeights(folder, weights)
            yield WeightFolder("zaya", source, source.run, source.step, None, folder, weights)
            return
    if weights != "raw":
        raise UserError(f"{path} is not a run and has no average of the weights; remove --weights={weights}")
    opened = open_folder(path)
    with PytorchWeights(opened) as source:
        yield WeightFolder(opened.layout, source, None, 0, opened, opened.folder)


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder is a run folder. Both kinds have a config.json; that of a run may be missing.

    Raises:
      UserError: if config.json is not JSON, or a file to copy is a pipe or a link out of the folder.
    """
    # Both kinds of folder have a config.json, which is read below to tell them apart.
    assert CONFIG == CONFIG_FILE
    check_files(folder)
    # A run without a readable config can be recovered from its checkpoint.
    if config_loss(folder) is not None and has_record(folder):
        return True
    if not (folder / CONFIG).is_file():
        return False
    fields: dict[str, Any] = read_json(folder / CONFIG)
    # Only the config of a run has this field.
    if "run_folder" in fields:
        check_files(folder / TOKENIZER_FOLDER)
    return "run_folder" in fields
