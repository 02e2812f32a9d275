"""Skips the parity tests without their references, transformers and torch."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Tests share the machine; more threads do not make these widths faster."""
    torch.set_num_threads(1)
