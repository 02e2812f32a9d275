"""Section `log`: experiment trackers."""

import dataclasses
from typing import Literal

from zaya_jax.config.rules import require, require_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Experiment trackers that receive metrics, config and samples.

    A run always writes these, and TensorBoard events, to its own folder as well.

    Attributes:
      wandb: Weights & Biases (package `wandb`). "online" sends to its server, or to the one that the
        package's environment variables set; "offline" writes to the run folder for `wandb sync`, without a
        network.
      trackio: whether to log to the package `trackio`, which stores runs on this machine for `trackio show`.
      project: project name in both trackers.
      name: name of the run in both trackers; None uses the name of the run folder.
    """

    # Off by default: neither package is a dependency, and "online" needs an account.
    wandb: Literal["off", "online", "offline"] = "off"
    trackio: bool = False
    project: str = "zaya_jax"
    name: str | None = None

    def __post_init__(self):
        require_choices("log", self)
        require(self.project != "", "log.project is empty; it must name a project")
        require(self.name != "", "log.name is empty; it must name the run, or be None for its folder's name")
