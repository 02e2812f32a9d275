"""The section `log`: who is told of a run besides the files in its folder."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Who is told of a run's metrics, config and samples, besides its folder and TensorBoard's events in it.

    Attributes:
      wandb: Weights & Biases (the package `wandb`). "online" sends to its server, or wherever the package's
        own variables say; "offline" writes into the run folder, for `wandb sync`, and needs no network.
      trackio: whether the package `trackio` is told; it keeps runs on this machine, for `trackio show`.
      project: under which both keep the run.
      name: of the run in both; None takes its folder's.
    """

    wandb: Literal["off", "online", "offline"] = "off"
    trackio: bool = False
    project: str = "zaya_jax"
    name: str | None = None

    def __post_init__(self):
        require_choices("log", self)
        require(self.project != "", "log.project is empty; it must name a project")
        require(self.name != "", "log.name is empty; it must name the run, or be None for its folder's name")
