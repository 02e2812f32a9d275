"""Downloads of models and data sets from the Hugging Face hub, by an id instead of a folder, and uploads."""

import dataclasses
import importlib
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

from zaya_jax.errors import UserError
from zaya_jax.platform.shell import install_command

Kind = Literal["model", "dataset"]
_ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
"""ORGANIZATION/NAME, optionally followed by "@" and a branch, tag or commit."""
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
"""Files of a model: weights in one format, configs, and the files of a tokenizer."""


@dataclasses.dataclass(frozen=True)
class Download:
    """A snapshot of a repository of the hub on this machine.

    Attributes:
      folder: local folder with the files.
      id: id of the repository, ORGANIZATION/NAME.
      revision: hash of the commit, even if a branch was requested.
    """

    folder: pathlib.Path
    id: str
    revision: str

    @property
    def name(self) -> str:
        """Name of the download in manifests and model cards."""
        return f"{self.id} at revision {self.revision}"


def is_hub_id(name: str) -> bool:
    """Whether a name can be a repository id: neither it nor its first part exists as a local path."""
    match = _ID.fullmatch(name)
    # If the first part is a folder, the name is a path with a typo, which must not be sent to the network.
    return match is not None and not any(map(os.path.lexists, (name, match["id"].partition("/")[0])))


def fetch(name: str, kind: Kind, *, patterns: Sequence[str] = _MODEL_FILES) -> Download | None:
    """Downloads a repository with a progress bar, or finds it in the cache.

    Args:
      name: "ORGANIZATION/NAME" for the latest revision, or "ORGANIZATION/NAME@REVISION".
      kind: type of the repository.
      patterns: glob patterns of the files to download, at any depth.

    Returns:
      The download; None if the name is not a hub id.

    Raises:
      UserError: if huggingface_hub is not installed, with a command to download; or if the download fails.
    """
    if not is_hub_id(name):
        return None
    match = _ID.fullmatch(name)
    assert match is not None, "is_hub_id matched"
    # Imported only when needed: huggingface_hub is optional.
    hub = _load_package(name, match["id"], kind)
    print(f"downloading the {_WORDS[kind]} {name} from the Hugging Face hub", file=sys.stderr, flush=True)
    # The hub matches a pattern with the whole path, so that files in sub-folders need a second pattern.
    wanted = [each for pattern in patterns for each in (pattern, f"*/{pattern}")]
    try:
        folder = hub.snapshot_download(
            repo_id=match["id"], repo_type=kind, revision=match["revision"], allow_patterns=wanted
        )
    except Exception as error:  # each version of huggingface_hub raises different classes
        raise _failed(name, kind, "downloaded from", error) from error
    # The folder of a snapshot is named after its commit.
    download = Download(pathlib.Path(folder), match["id"], pathlib.Path(folder).name)
    print(f"{download.name}: {folder}", file=sys.stderr, flush=True)
    return download


def pinned_revision(name: str, kind: Kind) -> tuple[str, str]:
    """Returns the id of a repository, and the commit that a name refers to now.

    Args:
      name: hub id, as for `fetch`.
      kind: type of the repository.

    Raises:
      UserError: if huggingface_hub is not installed, or the repository cannot be found.
    """
    match = _ID.fullmatch(name)
    assert match is not None, "the caller has checked the name"
    hub = _load_package(name, match["id"], kind)
    try:
        info = hub.HfApi().repo_info(match["id"], repo_type=kind, revision=match["revision"])
    except Exception as error:  # each version of huggingface_hub raises different classes
        raise _failed(name, kind, "found on", error) from error
    return match["id"], str(info.sha)


class Upload:
    """Upload of a folder to a repository of models.

    Attributes:
      id: id of the repository, ORGANIZATION/NAME.
    """

    def __init__(self, name: str, *, private: bool):
        """Creates the repository if it does not exist, so that a missing permission is found before the work.

        Args:
          name: id of the repository.
          private: whether a new repository is private.

        Raises:
          UserError: if the name is no id, huggingface_hub is not installed, or the hub refuses.
        """
        match = _ID.fullmatch(name)
        if match is None or match["revision"] is not None:
            raise UserError(f'--push is "{name}"; it must be the id of a repository, ORGANIZATION/NAME')
        self.id = name
        try:
            self._api = importlib.import_module("huggingface_hub").HfApi()
        except ImportError:
            raise UserError(
                f"--push needs huggingface_hub, which is not installed: {install_command('hub')}"
            ) from None
        try:
            self._api.create_repo(name, exist_ok=True, private=private)
        except Exception as error:  # each version of huggingface_hub raises different classes
            raise _failed(name, "model", "pushed to", error, "; `hf auth login` stores a token") from error

    def send(self, folder: pathlib.Path, message: str) -> str:
        """Uploads all files of a folder as one commit; files that the hub has already are not sent again.

        Args:
          folder: the folder.
          message: message of the commit.

        Returns:
          URL of the commit.

        Raises:
          UserError: if the upload fails, or the hub refuses the metadata of the model card.
        """
        print(f"uploading {folder} to {self.id} on the Hugging Face hub", file=sys.stderr, flush=True)
        try:
            commit = self._api.upload_folder(
                repo_id=self.id, folder_path=str(folder), commit_message=message, repo_type="model"
            )
        except Exception as error:  # each version of huggingface_hub raises different classes
            fix = "; run the same command again to continue"
            raise _failed(self.id, "model", "pushed to", error, fix) from error
        return str(commit.commit_url)


def _failed(name: str, kind: Kind, verb: str, error: Exception, fix: str = "") -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"the {_WORDS[kind]} {name} cannot be {verb} the hub: {reason}{fix}")


_WORDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}


def _load_package(name: str, repository: str, kind: Kind) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        target = repository.partition("/")[2]
        kind_option = " --repo-type dataset" if kind == "dataset" else ""
        raise UserError(
            f"there is no folder {name}; to get the {_WORDS[kind]} of that name from the Hugging Face hub, "
            f"install huggingface_hub, run `hf download {repository}{kind_option} --local-dir {target}` and "
            f"name the folder {target}"
        ) from None
