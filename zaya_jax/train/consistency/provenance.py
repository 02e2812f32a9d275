"""Provenance of checkpoints: config, corpora, versions and devices."""

import dataclasses
import datetime
import getpass
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zaya_jax.checkpoint import SavedStep, StepDescription, read_description
from zaya_jax.config import Config, corpus_folders
from zaya_jax.data.corpora.shards import Corpus, fingerprint
from zaya_jax.errors import UserError
from zaya_jax.platform.versions import package_version

PACKAGES = ("zaya_jax", "jax", "jaxlib", "orbax-checkpoint")
"""Packages whose versions affect results and files."""


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Provenance that all checkpoints of a run share.

    Attributes:
      config: config of the run.
      corpora: fingerprints of the corpora by folder.
      num_devices: number of devices.
    """

    config: Config
    corpora: dict[str, str]
    num_devices: int

    def of_step(self, step: int) -> StepDescription:
        """Returns the record for the checkpoint of a step whose save begins now."""
        return StepDescription(
            step=step,
            phase=self.config.phase_at(step).name,
            # Through JSON, which turns tuples into lists: the record equals what is read back.
            config=json.loads(self.config.to_text()),
            corpora=self.corpora,
            versions=_versions(),
            num_processes=jax.process_count(),
            num_devices=self.num_devices,
            # UTC, because clusters and users are in several time zones.
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )


def describe_origin(mesh: Mesh) -> dict[str, Any]:
    """Returns user, host, device and versions of an attempt, for its first event."""
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
    except (KeyError, OSError):  # a container may have a user id without a name
        return f"user {os.getuid()}"


def fingerprints(corpora: Mapping[str, Corpus]) -> dict[str, str]:
    """Returns the fingerprint of each corpus of a run, by its folder as the config names it."""
    return {folder: fingerprint(corpus) for folder, corpus in corpora.items()}


def check_corpora_of_copy(before: Sequence[str], config: Config, corpora: Mapping[str, Corpus]) -> None:
    """Checks that a run that is restored from peer copies reads the same corpora as before.

    Raises:
      UserError: if a corpus differs.
    """
    if corpora_in_order(config, fingerprints(corpora)) != list(before):
        raise UserError(
            f"the corpora of {config.run_folder} are not those that it has read: their text differs; restore "
            "them, or start a new run in another --config.run_folder"
        )


def corpora_in_order(config: Config, of_folder: Mapping[str, str]) -> list[str]:
    """Returns the fingerprints of a run's corpora in the order of its config, which may rename folders."""
    return [of_folder[folder] for folder in corpus_folders(config) if folder in of_folder]


def check_same_corpora(start: SavedStep, config: Config, corpora: Mapping[str, Corpus]) -> None:
    """Checks that a resumed run reads the same corpora as before, in any location.

    Its position is a number of sequences, which in another corpus would be other text.

    Raises:
      UserError: if a corpus differs.
    """
    about = read_description(start.run_folder, start.step)
    if about is None:  # a converted checkpoint has no record
        return
    current, before = fingerprints(corpora), corpus_folders(Config.from_dict(about.config))
    for now, then in zip(corpus_folders(config), before, strict=False):
        # The record of an early step does not have the corpora of later phases.
        if now in current and then in about.corpora and current[now] != about.corpora[then]:
            raise UserError(
                f"the corpus {now} is not the one that {start.run_folder} read up to step {start.step}: "
                "its text differs; restore that one, or start a new run in another "
                "--config.run_folder (--config.train.init_from starts from the weights of this one)"
            )
