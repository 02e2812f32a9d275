"""A folder of weights, a run's or PyTorch's, opened without being told which it is."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.convert import companions as beside
from zaya_jax.convert.companions import Companions
from zaya_jax.convert.plans import TargetLayout
from zaya_jax.convert.pytorch_folder import CONFIG, PytorchFolder, PytorchWeights, open_folder
from zaya_jax.convert.run_folder import RunWeights
from zaya_jax.convert.stream import Source
from zaya_jax.json_files import read_json


@dataclasses.dataclass(frozen=True)
class WeightFolder:
    """A folder of weights: what a conversion reads, or what one has made.

    Attributes:
      layout: of its weights.
      source: of its weights.
      run: the config of the run that it is; None for a PyTorch folder.
      step: of the checkpoint; 0 for a PyTorch folder.
      pytorch: the PyTorch folder that it is; None for a run.
      folder: where it lies.
    """

    layout: TargetLayout
    source: Source
    run: Config | None
    step: int
    pytorch: PytorchFolder | None
    folder: pathlib.Path

    def companions(self) -> Companions:
        """What goes along with its weights."""
        if self.pytorch is not None:
            return beside.of_folder(self.pytorch)
        assert self.run is not None
        return beside.of_run(self.folder, self.run, step=self.step)


@contextlib.contextmanager
def open_weight_folder(path: str | pathlib.Path) -> Iterator[WeightFolder]:
    """Opens a run folder, or a PyTorch folder of either layout.

    Raises:
      ValueError: if it is neither, or damaged.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ValueError(f"{folder} is {what}; it must be the folder of a run or of PyTorch weights")
    if is_run(folder):
        weights = RunWeights(folder)
        yield WeightFolder("zaya", weights, weights.run, weights.step, None, folder)
        return
    opened = open_folder(folder)
    with PytorchWeights(opened) as weights:
        yield WeightFolder(opened.layout, weights, None, 0, opened, folder)


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder's config.json is a run's; both kinds of folder have one."""
    assert CONFIG == CONFIG_FILE
    if not (folder / CONFIG).is_file():
        return False
    fields: dict[str, Any] = read_json(folder / CONFIG)
    return "run_folder" in fields
