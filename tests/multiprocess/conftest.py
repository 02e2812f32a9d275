"""The corpus that runs of several processes share."""

import pathlib

import pytest
from small_runs import build_small_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    return pathlib.Path(build_small_corpus(tmp_path_factory.mktemp("data") / "corpus").folder)
