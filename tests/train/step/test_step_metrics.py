"""Model FLOPs utilization of a logged step, computed by hand from its batch."""

import numpy as np
import pytest
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.model.flops import forward_flops_per_token, mean_keys, train_flops_per_token
from zaya_jax.platform.peak_flops import peak_flops
from zaya_jax.train.step.step_metrics import utilization

CONFIG = Config.from_dict(small_values(run_folder="r", corpus="c"))


def found(kind: str, positions_BT: np.ndarray) -> float:
    """Utilization of two devices at 5 million tokens/s."""
    flops = train_flops_per_token(CONFIG, 64, keys=mean_keys(CONFIG.model, positions_BT))
    return utilization(flops, 5e6, 2 * (peak_flops(kind) or 0))


@pytest.mark.parametrize("documents", [1, 2, 8, 64])
def test_packed_documents_attend_to_themselves_only(documents):
    model, length = CONFIG.model, 64 // documents
    parts = forward_flops_per_token(model, 64)
    products = sum(parts.values()) - sum(4 * keys * 2 * 16 for keys in (32.5, (16 * 17 / 2 + 48 * 16) / 64))
    window = sum(min(position + 1, 16) for position in range(length)) / length
    expected = 3 * (products + 4 * 2 * 16 * ((length + 1) / 2 + window)) * 5e6 / (2 * 1307.4e12)
    positions_BT = np.tile(np.arange(length), documents)[None]
    assert found("AMD Instinct MI300X", positions_BT) == pytest.approx(expected, rel=1e-12)


def test_a_gcd_has_half_of_its_card():
    positions_BT = np.arange(64)[None]
    card, gcd = (found(f"AMD Instinct {name}", positions_BT) for name in ("MI300X", "MI250X"))
    assert gcd / card == pytest.approx(1307.4 / 191.5)
