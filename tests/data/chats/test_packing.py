"""Packing: each example is whole and in exactly one window, with no more padding than other methods have."""

import math

import numpy as np
import pytest

from zaya_jax.data.chats.packed_windows import window_of_bytes, window_to_bytes
from zaya_jax.data.chats.packing import best_fit_decreasing, compare_packings, first_fit
from zaya_jax.data.chats.templates.encoding import EncodedChat
from zaya_jax.data.reading.batch import Batch

WINDOW = 4096


def heavy_tailed(seed, num=3000):
    """Most chats are short, and some are as long as a window: log-normal, like real answer lengths."""
    lengths = np.random.default_rng(seed).lognormal(math.log(400), 1.2, num).astype(int)
    return np.clip(lengths, 1, WINDOW).tolist()


@pytest.mark.parametrize("pack", [best_fit_decreasing, first_fit])
@pytest.mark.parametrize("lengths", [[], [7], [10] * 5, [1] * 31, [10, 1, 9, 2, 8, 3], [6, 5, 5, 4]])
def test_every_example_is_in_one_window_that_fits_it(pack, lengths):
    windows = pack(lengths, 10)
    assert sorted(i for window in windows for i in window) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in window) <= 10 for window in windows)


def first_fit_by_hand(lengths, window):
    rooms = []
    for length in lengths:
        at = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[at : at + 1] = [(rooms[at] if at < len(rooms) else window) - length]
    return [window - room for room in rooms]


def best_fit_by_hand(lengths, window):
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting, default=window)
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    return [window - room for room in rooms]


@pytest.mark.parametrize(
    ("pack", "by_hand"), [(first_fit, first_fit_by_hand), (best_fit_decreasing, best_fit_by_hand)]
)
@pytest.mark.parametrize("seed", range(5))
def test_packings_equal_the_textbook_algorithms(pack, by_hand, seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 200).tolist()
    filled = [sum(lengths[i] for i in window) for window in pack(lengths, 64)]
    assert sorted(filled) == sorted(by_hand(lengths, 64))


@pytest.mark.parametrize("seed", range(10))
def test_best_fit_decreasing_has_the_least_padding_without_cuts(seed):
    best, first, cut = compare_packings(heavy_tailed(seed), WINDOW)
    assert best.num_windows <= first.num_windows
    assert best.num_windows >= cut.num_windows  # the lower bound
    # The bound of best-fit decreasing: 11/9 of the optimum, plus one window.
    assert best.num_windows <= 11 / 9 * cut.num_windows + 1
    assert best.num_cut == first.num_cut == 0
    assert cut.num_cut > 0


def test_statistics_of_a_packing_by_hand():
    best, first, cut = compare_packings([6, 5, 5, 4], 10)
    assert [each.num_windows for each in (best, first, cut)] == [2, 2, 2]
    best, first, cut = compare_packings([4, 5, 6, 5], 10)
    assert [each.num_windows for each in (best, first, cut)] == [2, 3, 2]
    assert [each.padding for each in (best, first, cut)] == [0, pytest.approx(1 / 3), 0]
    assert [each.num_cut for each in (best, first, cut)] == [0, 0, 1]


def chat(tokens, learned):
    return EncodedChat(np.array(tokens, np.int32), np.array(learned, np.bool_))


def test_a_window_by_hand():
    """The second chat starts with a learned token, and the third is one token: neither is a target."""
    chats = [chat([5, 6, 7], [0, 1, 1]), chat([8, 0, 9], [1, 0, 1]), chat([4], [1])]
    raw = window_to_bytes(chats, length=9, pad_id=0, dtype="<u2")
    assert len(raw) == 9 * 2 + 2 * 2
    window = window_of_bytes(raw, length=9, pad_id=0, dtype="<u2")
    expected = Batch(
        tokens_BT=np.array([5, 6, 7, 8, 0, 9, 4, 0, 0], np.int32),
        targets_BT=np.array([6, 7, 8, 0, 9, 4, 0, 0, 0], np.int32),
        weights_BT=np.array([1, 1, 0, 0, 1, 0, 0, 0, 0], np.float32),
        positions_BT=np.array([0, 1, 2, 0, 1, 2, 0, 0, 0], np.int32),
        segments_BT=np.array([1, 1, 1, 2, 2, 2, 3, 0, 0], np.int32),
    )
    for name, values in vars(expected).items():
        np.testing.assert_array_equal(getattr(window, name), values, err_msg=name, strict=True)


@pytest.mark.parametrize(("lengths", "dtype"), [([8], "<u2"), ([3, 5], "<u4"), ([1] * 8, "<u2")])
def test_a_full_window_has_no_padding(lengths, dtype):
    tokens = iter(range(70_000 if dtype == "<u4" else 1, 80_000))
    chats = [chat([next(tokens) for _ in range(n)], [1] * n) for n in lengths]
    window = window_of_bytes(
        window_to_bytes(chats, length=8, pad_id=0, dtype=dtype), length=8, pad_id=0, dtype=dtype
    )
    assert window.tokens_BT.tolist() == np.concatenate([each.tokens_T for each in chats]).tolist()
    assert window.weights_BT.sum() == 8 - len(lengths)
    assert window.segments_BT.tolist() == np.repeat(np.arange(1, len(lengths) + 1), lengths).tolist()
