"""No token of a corpus is repeated before all have been read, whatever the phases of a run are."""

import collections
import functools
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from zaya_jax.config import Config, step_ranges
from zaya_jax.data.reading.mixture import MixturePosition
from zaya_jax.data.reading.positions import describe_epochs, draws, mixture_positions

SIZES = {"a": 1000, "b": 577, "c": 320}
"""Tokens of each corpus; none is a multiple of all sequence lengths."""


def config_of(*phases):
    return Config.from_dict(
        {
            "data": {
                "sequence_length": 32,
                "batch_size": 4,
                "mixtures": [
                    {"name": "first", "corpora": ["a", "b"], "weights": [0.7, 0.3]},
                    {"name": "second", "corpora": ["c", "b", "a"], "weights": [1, 3, 2]},
                ],
                "mixture": "first",
            },
            "optimizer": {"warmup_steps": 0},
            "phases": list(phases),
        }
    )


TWO_PHASES = config_of(
    {"name": "short", "steps": 7, "data": {"batch_ramp": [[3, 32], [2, 96]]}},
    {"name": "long", "steps": 20, "data": {"mixture": "second", "sequence_length": 96, "batch_size": 3}},
    {"name": "again", "steps": 20, "data": {"sequence_length": 32, "batch_size": 5}},
)


def spans(config, *, first_step=0, sizes=SIZES):
    """What each step reads: corpus, first token and end of each of its sequences."""
    for step_range, reading in mixture_positions(config, sizes, first_step=first_step):
        for step in range(step_range.first_step, step_range.end):
            start = (step - step_range.first_step) * step_range.batch_size
            yield [reading.sequence(start + i) for i in range(step_range.batch_size)]


def assert_none_is_read_twice_before_all_were_read_once(read, sizes):
    """Whenever a token is read, every token of its corpus has been read at least as often before."""
    counts = {name: np.zeros(size, int) for name, size in sizes.items()}
    for folder, first, last in read:
        assert 0 <= first < last <= sizes[folder]
        assert counts[folder][first:last].max() == counts[folder].min()
        counts[folder][first:last] += 1
    return counts


def test_phases_with_other_mixtures_and_lengths_continue_each_corpus():
    read = [span for step in undisturbed() for span in step]
    counts = assert_none_is_read_twice_before_all_were_read_once(read, SIZES)
    assert all(count.min() >= 1 for count in counts.values()), "some epochs must have been read"


@functools.cache
def undisturbed():
    return list(spans(TWO_PHASES))


@pytest.mark.parametrize("first_step", [0, 1, 3, 5, 6, 7, 8, 20, 26, 27, 28, 46])
def test_a_run_resumed_at_any_step_reads_the_same_batches(first_step):
    """Resuming in a batch ramp, at its boundaries and at those of the phases."""
    actual = list(itertools.islice(spans(TWO_PHASES, first_step=first_step), 9))
    assert actual == undisturbed()[first_step:][:9]


PHASES = st.lists(
    st.fixed_dictionaries(
        {
            "steps": st.integers(1, 9),
            "data": st.fixed_dictionaries(
                {
                    "mixture": st.sampled_from(["first", "second"]),
                    "sequence_length": st.sampled_from([8, 16, 32, 96, 64]),
                    "batch_size": st.integers(1, 7),
                }
            ),
        }
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@hypothesis.settings(derandomize=True, database=None, deadline=None, max_examples=10)
@hypothesis.given(phases=PHASES, sizes=st.tuples(*[st.integers(97, 700)] * 3))
def test_any_phases(phases, sizes):
    config = config_of(*({"name": f"p{i}"} | phase for i, phase in enumerate(phases)))
    sizes = dict(zip(SIZES, sizes, strict=True))
    read = [span for step in spans(config, sizes=sizes) for span in step]
    assert_none_is_read_twice_before_all_were_read_once(read, sizes)
    assert len(read) == sum(s.num_steps * s.batch_size for s in step_ranges(config))
    assert_draws_are_what_is_read(config, sizes)


def assert_draws_are_what_is_read(config, sizes):
    """Counts each sequence of each phase one by one."""
    steps, so_far = spans(config, sizes=sizes), collections.Counter()
    for phase in config.resolved_phases:
        read = [span for step in itertools.islice(steps, phase.config.train.num_steps) for span in step]
        drawn = draws(config, sizes)[phase.name]
        sequences = collections.Counter(folder for folder, _, _ in read)
        assert {draw.folder: draw.sequences for draw in drawn if draw.sequences} == sequences
        for draw in drawn:
            tokens = sum(last - first for folder, first, last in read if folder == draw.folder)
            so_far[draw.folder] += tokens
            assert draw.tokens == tokens
            assert draw.epochs == pytest.approx(tokens / sizes[draw.folder])
            assert draw.epochs_so_far == pytest.approx(so_far[draw.folder] / sizes[draw.folder])


def test_draws_of_phases_with_other_mixtures_lengths_and_batches():
    assert_draws_are_what_is_read(TWO_PHASES, SIZES)


def test_draws_by_hand():
    """Of 8 sequences, 6 are of "a" for 0.7 and 2 of "b" for 0.3; then one, three and two for 1, 3 and 2."""
    config = config_of(
        {"name": "one", "steps": 2},
        {"name": "two", "steps": 1, "data": {"mixture": "second", "batch_size": 6}},
    )
    one, two = draws(config, SIZES).values()
    assert [(d.folder, d.sequences, d.tokens) for d in one] == [("a", 6, 192), ("b", 2, 64)]
    assert [(d.folder, d.sequences, d.tokens) for d in two] == [("c", 1, 32), ("b", 3, 96), ("a", 2, 64)]
    assert [d.weight for d in one] == pytest.approx([0.7, 0.3])
    assert two[2].epochs == pytest.approx(0.064)
    assert two[2].epochs_so_far == pytest.approx(0.256)


def test_a_change_of_length_costs_at_most_one_short_sequence_per_corpus():
    lengths = collections.defaultdict(list)
    for step in undisturbed():
        for folder, first, last in step:
            lengths[folder].append(last - first)
    for folder, actual in lengths.items():
        epochs = sum(actual) // SIZES[folder] + 1
        assert (
            sum(n not in (32, 96) for n in actual) <= epochs + 2
        )  # the end of an epoch, and two changes of length


def test_a_run_of_one_length_shuffles_by_sequence():
    """A corpus that is read at two lengths is shuffled in units of the longer one."""
    (_, reading), *_ = mixture_positions(config_of({"name": "one", "steps": 5}), SIZES)
    firsts = [first for folder, first, _ in map(reading.sequence, range(40)) if folder == "a"]
    neighbours = np.diff(firsts) == 32
    assert neighbours.mean() < 0.2


def test_epochs_by_hand():
    """Of 8 sequences of 32 the mixture has 6 of "a" and 2 of "b"; "c" comes with the second phase."""
    config = config_of(
        {"name": "one", "steps": 2},
        {"name": "two", "steps": 1, "data": {"mixture": "second", "batch_size": 6}},
    )
    (_, first), (_, second) = mixture_positions(config, SIZES)
    assert first.epochs() == {"a": 0, "b": 0, "c": 0}
    assert second.epochs() == pytest.approx({"a": 6 * 32 / 1000, "b": 2 * 32 / 577, "c": 0})
    at_end: MixturePosition = second.after(6)  # one of "c", three of "b", two of "a"
    assert at_end.epochs() == pytest.approx({"a": 8 * 32 / 1000, "b": 5 * 32 / 577, "c": 32 / 320})
    assert describe_epochs(at_end) == "epochs read so far: a 0.256, b 0.277, c 0.1"
