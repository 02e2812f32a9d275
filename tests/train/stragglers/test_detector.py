"""The rule that names stragglers, with synthetic times: clean runs, slow processes, bursts, small groups."""

import numpy as np
import pytest

from zaya_jax.train.stragglers.detector import StragglerDetector

CHECKS, MARGIN = 5, 0.05


def noise(numbers, num_checks, num_members):
    """Shares of a step that processes take for themselves, with bursts of many steps' length now and then."""
    return 0.02 + 0.01 * np.abs(numbers.standard_t(2, (num_checks, num_members)))


def changes(shares_CN, base=2.0):
    """Changes of one run, with the number of the check."""
    detector = StragglerDetector(margin=MARGIN, num_checks=CHECKS)
    return [
        (c, change)
        for c, shares_N in enumerate(shares_CN)
        for change in detector.add("read", (base * shares_N).tolist(), base)
    ]


@pytest.mark.parametrize("num_members", [2, 3, 4, 64])
def test_clean_runs_raise_no_alarm(num_members):
    """500 runs of four processes, and 50 of others; the noise exceeds the margin in 3% of 100 checks."""
    numbers, exceeding = np.random.default_rng(num_members), []
    for _ in range(500 if num_members == 4 else 50):
        shares_CN = noise(numbers, 100, num_members)
        exceeding.append(np.mean(shares_CN > MARGIN + 0.02))
        assert changes(shares_CN) == []
    assert np.mean(exceeding) > 0.03


@pytest.mark.parametrize("num_members", [2, 4, 16])
@pytest.mark.parametrize(("percent", "min_found"), [(10, 0.95), (30, 1.0)])
def test_slow_processes_are_named_and_nobody_else(num_members, percent, min_found):
    numbers, found = np.random.default_rng(percent + num_members), 0
    for _ in range(40):
        slow = numbers.integers(num_members)
        shares_CN = noise(numbers, 100, num_members)
        shares_CN[20:60, slow] += percent / 100
        actual = changes(shares_CN)
        assert {change.member for _, change in actual} <= {slow}
        found += any(20 <= c < 60 for c, change in actual if change.begins)
        # Noise may complete the first or last checks, but no more than two of them.
        for c, change in actual:
            assert c > (20 if change.begins else 60) + CHECKS - 4
    assert found >= min_found * 40


def test_one_event_when_it_begins_and_one_when_it_ends():
    shares_CN = np.full((60, 4), 0.01)
    shares_CN[10:30, 2] += 0.2
    shares_CN[17, 2] = 0.01  # a slow process has good moments too
    (begin, began), (end, ended) = changes(shares_CN)
    assert (begin, end) == (10 + CHECKS - 1, 30 + CHECKS - 1)
    assert (began.section, began.member, began.begins) == ("read", 2, True)
    assert (ended.section, ended.member, ended.begins) == ("read", 2, False)
    assert began.share == pytest.approx(0.2)
    assert ended.share == pytest.approx(0.0)


def test_bursts_are_no_slowness():
    """A process that loses much in all checks but every fifth one."""
    shares_CN = np.full((60, 4), 0.01)
    shares_CN[np.arange(60) % CHECKS != 0, 1] += 0.5
    assert changes(shares_CN) == []


def test_two_of_eight_are_both_named():
    shares_CN = np.full((20, 8), 0.01)
    shares_CN[:, [3, 6]] += 0.1
    assert [change.member for _, change in changes(shares_CN)] == [3, 6]


def test_processes_that_differ_by_nature_are_no_stragglers():
    """The slowest of a group with a wide spread is not far from the others."""
    shares_CN = np.tile([0.0, 0.1, 0.2, 0.3, 0.4], (20, 1))
    assert changes(shares_CN) == []


def test_sections_are_separate_and_one_process_has_nobody_to_compare_with():
    detector = StragglerDetector(margin=MARGIN, num_checks=2)
    for _ in range(4):
        assert detector.add("alone", [1.0], 1.0) == []
    assert detector.add("read", [0.0, 0.0, 1.0], 1.0) == detector.add("save", [0.0, 0.0, 1.0], 1.0) == []
    assert [change.section for change in detector.add("save", [0.0, 0.0, 1.0], 1.0)] == ["save"]
