import gc

import pytest

from zaya_jax.platform.garbage_collection import THRESHOLDS, rare_collection


def test_the_thresholds_are_restored():
    before = gc.get_threshold()
    try:
        with rare_collection():
            assert gc.get_threshold() == THRESHOLDS
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() > 0
        with pytest.raises(KeyError), rare_collection():
            raise KeyError
        assert gc.get_threshold() == before
    finally:
        gc.unfreeze()  # other tests count what is left after a collection
