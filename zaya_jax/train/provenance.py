"""Where a state comes from: what each checkpoint of a run says, and what a run that goes on asks of it."""

import dataclasses
import datetime
import getpass
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zaya_jax.checkpoint import About, SavedStep, read_about
from zaya_jax.config import Config, corpora_by_use
from zaya_jax.data.shards import Corpus, fingerprint
from zaya_jax.platform.versions import package_version

PACKAGES = ("zaya_jax", "jax", "jaxlib", "orbax-checkpoint")
"""Those whose versions decide what was computed and written."""


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What all checkpoints of a run say alike.

    Attributes:
      config: of the run.
      corpora: fingerprints by folder.
      num_devices: that it trains on.
    """

    config: Config
    corpora: dict[str, str]
    num_devices: int

    def of_step(self, step: int) -> About:
        """What the checkpoint of a step says, whose save begins now."""
        return About(
            step=step,
            phase=self.config.phase_at(step).name,
            # Lists for tuples, as the file will have them: what is read back equals what was written.
            config=json.loads(self.config.to_text()),
            corpora=self.corpora,
            versions=_versions(),
            num_processes=jax.process_count(),
            num_devices=self.num_devices,
            # Not local time: clusters and those who look at their folders live in several zones.
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )


def describe_origin(mesh: Mesh) -> dict[str, Any]:
    """Who begins a life of a run, where, and with which versions; its last checkpoint knows only the last."""
    return {
        "user": _user(),
        "host": socket.gethostname(),
        "device": mesh.devices.flat[0].device_kind,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {package: package_version(package) for package in PACKAGES}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        return f"user {os.getuid()}"


def fingerprints(corpora: Mapping[str, Corpus]) -> dict[str, str]:
    """Of each corpus of a run, by its folder as the config names it."""
    return {folder: fingerprint(corpus) for folder, corpus in corpora.items()}


def check_same_corpora(start: SavedStep, config: Config, corpora: Mapping[str, Corpus]) -> None:
    """Checks that a run that goes on finds the corpora that it has read, wherever they lie now.

    Its place in them is a number of sequences: in another corpus that would be other text.

    Raises:
      ValueError: if one is another.
    """
    about = read_about(start.run_folder, start.step)
    if about is None:  # one that was converted has nothing to hold against
        return
    found, before = fingerprints(corpora), corpora_by_use(Config.from_dict(about.config))
    for now, then in zip(corpora_by_use(config), before, strict=False):
        # What phases that came later read is not known of a step before them.
        if now in found and then in about.corpora and found[now] != about.corpora[then]:
            raise ValueError(
                f"the corpus {now} is not the one that {start.run_folder} read up to step {start.step}: "
                "its text is another; put that one back, or begin a new run in another "
                "--config.run_folder (--config.train.init_from starts from the weights of this one)"
            )
