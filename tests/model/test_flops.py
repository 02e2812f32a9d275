"""FLOPs of attention in batches of packed documents, compared with masks that are counted entry by entry."""

import dataclasses
import math

import numpy as np
import pytest
from small_runs import small_values

from zaya_jax.config import Config
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import PADDING, make_example
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.model.flops import forward_flops_per_token, mean_keys, train_flops_per_token
from zaya_jax.options import load_config
from zaya_jax.train.hooks.step_meter import AttendedKeys

LENGTH, WINDOW = 64, 16
CONFIG = Config.from_dict(small_values(run_folder="r", corpus="c"))
MODEL = CONFIG.model  # a sliding layer and a full one
DELIMITERS: DocumentDelimiters = ByteTokenizer().delimiters


def rows(*lengths_of_rows):
    """Returns positions of rows with documents of the given lengths; the rest of a row is padding."""
    tokens_BT = np.full((len(lengths_of_rows), LENGTH), PADDING)
    for tokens_T, lengths in zip(tokens_BT, lengths_of_rows, strict=True):
        start = 0
        for length in lengths:
            tokens_T[start : start + length] = 65
            tokens_T[start] = DELIMITERS.first_id
            start += length
    return tokens_BT


BATCHES = {
    "one document a row": rows((64,), (64,)),
    "eight equal documents": rows((8,) * 8),
    "one token each": rows((1,) * 64),
    "odd lengths": rows((1, 30, 2, 31), (63, 1), (5, 59)),
    "as long as the window, and one more": rows((16, 17, 15, 16)),
    "padding": rows((10, 3), (64,), (1,)),
}


def counted(batch, window):
    """Counts the entries of the mask: same segment, not later, within the window; padding sees itself."""
    segments_BT, time_T = np.asarray(batch.segments_BT), np.arange(LENGTH)
    distance_TS = time_T[:, None] - time_T
    mask_BTS = (segments_BT[:, :, None] == segments_BT[:, None]) & (distance_TS >= 0) & (distance_TS < window)
    keys_BT = np.where(segments_BT > 0, mask_BTS.sum(-1), 1)
    return keys_BT.mean()


@pytest.mark.parametrize("name", BATCHES)
def test_visible_keys_are_those_of_the_mask(name):
    batch = make_example(BATCHES[name], delimiters=DELIMITERS)
    actual = mean_keys(MODEL, np.asarray(batch.positions_BT))
    assert actual == pytest.approx(
        {"hybrid_sliding": counted(batch, WINDOW), "hybrid": counted(batch, LENGTH)}, rel=1e-12
    )


def test_one_document_per_row_costs_as_much_as_a_sequence():
    batch = make_example(BATCHES["one document a row"], delimiters=DELIMITERS)
    keys = mean_keys(MODEL, np.asarray(batch.positions_BT))
    assert train_flops_per_token(CONFIG, LENGTH, keys=keys) == pytest.approx(
        train_flops_per_token(CONFIG, LENGTH)
    )
    actual, expected = (forward_flops_per_token(MODEL, LENGTH, keys=each) for each in (keys, None))
    assert actual == pytest.approx(expected)


@pytest.mark.parametrize(("documents", "ratio"), [(1, 1.0), (16, 4.1), (128, 5.0)])
def test_packed_examples_of_the_8b_preset_cost_what_their_documents_cost(documents, ratio):
    """131,072 tokens per row: scores and values cost 4 operations per key, head and channel, three times."""
    config = load_config("configs/zaya1_8b.py", [])
    model, length = config.model, 131_072
    positions_BT = np.tile(np.arange(length // documents), documents)[None]
    actual = train_flops_per_token(config, length, keys=mean_keys(model, positions_BT))
    whole = train_flops_per_token(config, length)
    a_key = 3 * 4 * model.num_attention_heads * model.head_dim * model.num_hidden_layers
    assert whole - actual == pytest.approx(a_key * (length - length // documents) / 2, rel=1e-12)
    assert whole / actual == pytest.approx(ratio, abs=0.05)


def test_steps_and_microbatches_are_averaged():
    batches = [
        make_example(BATCHES[name], delimiters=DELIMITERS)
        for name in ("one token each", "eight equal documents")
    ]
    attended = AttendedKeys(MODEL, is_needed=True)
    for batch in batches:
        attended.add(np.asarray(batch.positions_BT))
    assert attended.take() == {"hybrid_sliding": (1 + 4.5) / 2, "hybrid": (1 + 4.5) / 2}
    attended.add(np.asarray(batches[0].positions_BT))
    assert attended.take() == {"hybrid_sliding": 1.0, "hybrid": 1.0}


def test_without_a_known_peak_there_is_no_utilization():
    attended = AttendedKeys(MODEL, is_needed=False)
    attended.add(np.zeros((1, 4), np.int32))
    assert attended.take() is None


def test_without_a_window_all_layers_cost_the_same():
    model = dataclasses.replace(MODEL, layer_pattern=("hybrid",), sliding_window=None)
    assert mean_keys(model, np.arange(10)[None]) == {"hybrid": math.fsum(range(1, 11)) / 10}
