"""The reference is transformers on torch; without them there is nothing to compare with."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Tests share the machine; more threads do not make these widths faster."""
    torch.set_num_threads(1)
