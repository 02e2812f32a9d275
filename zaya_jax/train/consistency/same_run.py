"""Checks that all processes of a run have the same config, code, packages and data.

With another learning rate in one process, a run would continue without an error and learn something else.
"""

import importlib.metadata
import json
import pathlib
import platform
import re
from collections.abc import Iterator, Mapping

import jax

import pallas_kernels
from zaya_jax.config import Config, ResumeRule, corpus_folders, resume_rule
from zaya_jax.data.corpora.shards import Corpus, fingerprint
from zaya_jax.fields import dotted_items
from zaya_jax.files import durable
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.consistency import require_same

_MAY_DIFFER = ("run_folder", "profile")
"""Hosts may see the run folder under different names, and a profile may be of single processes."""
_PLACES = ("corpus", "source", "tokenizer", "corpora")
"""Last parts of the names of fields with locations of data: the content is compared instead."""
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
"""Settings that affect results, which environment variables may change."""
_ROOTS = (pathlib.Path(__file__).parents[2], pathlib.Path(pallas_kernels.__path__[0]))
"""Folders of our packages."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_same_run(config: Config, *, replay_check: int | None) -> None:
    """Checks, before anything is compiled, that all processes have the same config, code and packages.

    Args:
      config: config of this process.
      replay_check: number of steps to repeat first, which must be equal in all processes.

    Raises:
      CollectiveError: naming each process that differs, and the difference.
    """
    if hosts.num_processes() == 1:
        return
    # Code first: with other code a config may have other fields too, which would mask the cause.
    require_same("code", code_hashes())
    require_same("packages", package_versions())
    require_same("config", config_values(config) | {"--replay-check": str(replay_check)})


def check_same_data(config: Config, corpora: Mapping[str, Corpus]) -> None:
    """Checks that all processes read the same tokens, wherever their corpora are.

    Compares the hashes of all blocks in each corpus's manifest. The files are verified against them when a
    corpus is opened, up to `HASHED_AT_OPENING`, and for every block when it is read.

    Raises:
      CollectiveError: as `check_same_run`.
    """
    used = corpus_folders(config)
    values = {}
    for number, folder in enumerate(used):
        # Named by first use: one corpus under two names is read differently from one under a single name.
        name = f"corpus {number} (first named as {used.index(folder)})"
        corpus = corpora.get(folder)
        values[name] = (
            "unused"
            if corpus is None
            else f"{fingerprint(corpus)} of {corpus.train.tokens} and {corpus.validation.tokens} tokens"
        )
    require_same("data", values)


def config_values(config: Config) -> dict[str, str]:
    """Returns the fields that all processes must share, as JSON by dotted name."""
    return {
        name: json.dumps(value, default=str, sort_keys=True)
        for name, value in _flat(config)
        if name.split(".")[0] not in _MAY_DIFFER and not _is_place(name)
    }


def _is_place(name: str) -> bool:
    return resume_rule(name) is ResumeRule.PATH and name.rpartition(".")[2] in _PLACES


def _flat(config: Config) -> Iterator[tuple[str, object]]:
    for name, value in dotted_items(config):
        if isinstance(value, dict):  # fields of a section that a phase overrides
            yield from ((f"{name}.{field}", each) for field, each in value.items())
        else:
            yield name, value


def code_hashes() -> dict[str, str]:
    """Returns hashes of all our source files by name."""
    hashes = {}
    for root in _ROOTS:
        # By content: a checkout and an installed package may have the same code in different places.
        for path in sorted(root.rglob("*.py")):
            name = f"{root.name}/{path.relative_to(root)}"
            hashes[name] = durable.hash_of(path.read_bytes()).hex()[:16]
    return hashes


def package_versions() -> dict[str, str]:
    """Returns the versions of Python, of all required packages and of jax's plugins, and settings of jax."""
    versions = {"Python": platform.python_version()}
    plugins = [
        entry.dist.name for entry in importlib.metadata.entry_points(group="jax_plugins") if entry.dist
    ]
    # Requirements of requirements too, but no other installed packages, which cannot affect the run.
    waiting = ["zaya_jax", *plugins]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in versions:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # required on another system or Python, or a checkout
            continue
        versions[name] = distribution.version
        waiting += _required(distribution.requires or [])
    return versions | {name: str(getattr(jax.config, name)) for name in _JAX_SETTINGS}


def _required(requirements: list[str]) -> list[str]:
    """Returns names of packages that are always required; extras belong to other commands."""
    return [
        match[0]
        for each in requirements
        if "extra ==" not in each and (match := _NAME.match(each)) is not None
    ]
