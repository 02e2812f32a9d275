"""Tests for a GPU, which are skipped without one."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def _gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"there is no GPU here; jax runs on {jax.default_backend()}")
