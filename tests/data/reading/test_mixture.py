"""Several corpora as one stream: shares, order, and that only the index determines a sequence."""

import collections
import pathlib

import numpy as np
import pytest
from small_runs import reading_from_the_start

from zaya_jax.config import Config, DataConfig, MixtureConfig
from zaya_jax.data.corpora.command import main
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.reading.loader import evaluation_batches, training_batches
from zaya_jax.data.reading.mixture import Mixture, corpus_of, mixture_of, whole_weights
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

LETTERS = "abc"
LENGTH = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A corpus for each letter."""
    made = []
    for letter in LETTERS:
        source = tmp_path_factory.mktemp(f"texts_{letter}")
        for i in range(40):
            (source / f"{i}.txt").write_text(letter * (41 + i))
        made.append(tmp_path_factory.mktemp("corpora") / letter)
        build_corpus(
            made[-1], source=str(source), tokenizer=ByteTokenizer(), block_tokens=32, validation_percent=20
        )
    return tuple(map(str, made))


WEIGHTS = (5, 3, 2)


def rows(folders, *, weights=WEIGHTS, first_sequence=0, batch_size=4, num_steps):
    corpora = {folder: open_corpus(folder) for folder in folders}
    reading = reading_from_the_start(corpora, length=LENGTH, weights=weights).after(first_sequence)
    batches = training_batches(reading, corpora, batch_size=batch_size, num_steps=num_steps)
    return [row for batch in batches for row in batch.tokens_BT]


def letter(row):
    """The letter that a window consists of."""
    text = ByteTokenizer().decode(row.tolist())
    (actual,) = set(text) & set(LETTERS)
    return actual


@pytest.mark.parametrize("weights", [(1, 1), (7, 3), (861, 57, 8, 30, 30, 14), (1, 10**6), (5,)])
def test_shares_hold_at_any_index(weights):
    """Each corpus has its share up to one sequence per corpus, and its sequences come in order and
    completely.
    """
    counts, total = collections.Counter(), sum(weights)
    for index in range(5000):
        corpus, sequence = corpus_of(index, weights)
        assert sequence == counts[corpus]
        counts[corpus] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[i] * total - (index + 1) * weight) <= len(weights) * total


def test_a_position_beyond_all_tokens_of_the_world_is_exact():
    """No floating point anywhere: at 10**18 sequences the period is still exact."""
    weights, start = (7, 3), 10**18
    picked = [corpus_of(index, weights) for index in range(start, start + 10)]
    assert sorted(corpus for corpus, _ in picked) == [0] * 7 + [1] * 3
    assert picked[0] == (0, 7 * 10**17)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.3), (7, 3)),
        ((2.0, 4.0), (1, 2)),
        ((86.1, 5.7, 0.8), (861, 57, 8)),
        ((3.0,), (1,)),
        ((1e-3, 1.0), (1, 1000)),
    ],
)
def test_weights_keep_the_written_ratios(weights, expected):
    assert whole_weights(weights) == expected


def test_the_mixture_of_a_config(folders):
    named = MixtureConfig(name="abc", corpora=folders, weights=(0.5, 0.3, 0.2))
    config = DataConfig(corpus="held_out", source=None, mixtures=(named,), mixture="abc")
    assert mixture_of(config) == Mixture(folders, WEIGHTS)
    assert mixture_of(DataConfig(corpus="alone", source=None)) == Mixture(("alone",), (1,))


def test_batches_have_the_shares_of_the_mixture(folders):
    actual = collections.Counter(letter(row) for row in rows(folders, num_steps=50))
    assert actual == {"a": 100, "b": 60, "c": 40}


@pytest.mark.parametrize("first_sequence", [1, 4, 28, 30, 132])
def test_a_resumed_mixture_reads_the_same_batches(folders, first_sequence):
    undisturbed = rows(folders, num_steps=40)
    resumed = rows(folders, first_sequence=first_sequence, batch_size=1, num_steps=160 - first_sequence)
    np.testing.assert_array_equal(resumed, undisturbed[first_sequence:])


def test_a_mixture_reads_every_window_of_its_corpora(folders):
    """Each corpus has its own shuffled order, independent of the others."""
    corpus = open_corpus(folders[2])
    batches = evaluation_batches(corpus, split="train", sequence_length=LENGTH, batch_size=1)
    held = [batch.tokens_BT[0].tobytes() for batch in batches]
    enough = rows(folders, num_steps=2 * len(held))  # of 4 sequences, of which a fifth is from this corpus
    read = [row.tobytes() for row in enough if letter(row) == "c"]
    assert sorted(read[: len(held)]) == sorted(held)
    assert len(read) >= len(held)
    alone = rows(folders[2:], weights=(1,), batch_size=1, num_steps=len(held))
    assert read[: len(held)] == [row.tobytes() for row in alone]


def test_inspecting_a_run_shows_its_draws(folders, tmp_path, capsys):
    """Only manifests are read, so the other files of the corpora may be missing."""
    copies = [tmp_path / letter for letter in LETTERS]
    for copy, folder in zip(copies, map(pathlib.Path, folders), strict=True):
        copy.mkdir()
        for name in ("manifest.json", "committed"):
            (copy / name).write_bytes((folder / name).read_bytes())
    mixtures = ({"name": "m", "corpora": tuple(map(str, copies)), "weights": WEIGHTS},)
    values = {
        "data": {"mixtures": mixtures, "mixture": "m", "sequence_length": LENGTH, "batch_size": 4},
        "optimizer": {"warmup_steps": 0},
    }
    config = tmp_path / "config.json"
    config.write_text(Config.from_dict(values).to_text())
    main(["inspect", f"--config={config}", "--config.train.num_steps=10"])
    printed = capsys.readouterr().out
    assert "steps 1 to 10, mixture m" in printed
    assert "40 sequences of 16" in printed
    (row,) = (line for line in printed.splitlines() if "50.00%" in line)
    tokens = open_corpus(folders[0]).train.tokens
    assert row.split()[-5:] == ["50.00%", "20", "320", f"{320 / tokens:.4g}", f"{320 / tokens:.4g}"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "requires either a CORPUS or the --config of a run"),
        (["corpus", "--config=configs/tiny.py"], "requires either a CORPUS"),
        (["corpus", "--config.train.num_steps=3"], "sets a config field, but there is no --config=FILE"),
        (["--config=configs/tiny.py", "--config.data.corpus=nowhere"], "there is no corpus at nowhere"),
    ],
)
def test_invalid_inspections(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        main(["inspect", *words])
