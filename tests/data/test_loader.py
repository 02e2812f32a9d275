import itertools
import threading
import time

import chex
import numpy as np
import pytest

from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.loader import evaluation_batches, num_sequences
from zaya_jax.data.loader import training_batches as mixture_batches
from zaya_jax.data.mixture import Mixture
from zaya_jax.data.tokenizer import ByteTokenizer

BLOCK = 64


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return {f"{i}.txt": "".join(rng.choice(list("abc\né漢"), rng.integers(1, 120))) for i in range(60)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts):
    source = tmp_path_factory.mktemp("source")
    for name, text in texts.items():
        (source / name).write_text(text, encoding="utf-8")
    return build_corpus(
        tmp_path_factory.mktemp("corpora") / "corpus",
        source=str(source),
        tokenizer=ByteTokenizer(),
        block_tokens=BLOCK,
        validation_percent=30,
        shard_tokens=5 * BLOCK,
    )


def training_batches(corpus, *, first_step=0, **values):
    """Of one corpus, after so many batches of the same size."""
    values = {"sequence_length": 32, "batch_size": 4, "seed": 7, **values}
    first_sequence = first_step * values["batch_size"]
    return mixture_batches(Mixture((corpus,), (1,)), first_sequence=first_sequence, **values)


def _take(batches, count):
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def _rows(batches):
    return [row.tobytes() for batch in batches for row in batch.tokens_BT]


@pytest.mark.parametrize("sequence_length", [2, 32, 64, 128, 192])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_windows_are_the_documents(corpus, texts, split, sequence_length):
    batches = evaluation_batches(corpus, split=split, sequence_length=sequence_length, batch_size=3)
    tokens = np.concatenate([batch.tokens_BT.ravel() for batch in batches])
    real = tokens[: corpus.split(split).tokens]
    assert (real != corpus.pad_id).all()
    assert (tokens[len(real) :] == corpus.pad_id).all()
    documents = np.split(real, np.flatnonzero(real == corpus.bos_id)[1:])
    decoded = [ByteTokenizer().decode(document.tolist()) for document in documents]
    assert len(decoded) == corpus.split(split).documents
    assert set(decoded) <= set(texts.values())


def test_both_splits_are_all_documents(corpus):
    assert corpus.train.documents + corpus.validation.documents == 60


def test_evaluation_predicts_every_token_but_the_first_of_a_piece(corpus):
    batches = list(evaluation_batches(corpus, split="validation", sequence_length=32, batch_size=5))
    pieces = sum(batch.segments_BT.max(axis=-1).sum() for batch in batches)
    assert sum(batch.weights_BT.sum() for batch in batches) == corpus.validation.tokens - pieces
    sequences = num_sequences(corpus, "validation", 32)
    assert sequences % 5, "the last batch must be short for this test"
    assert len(batches) == -(-sequences // 5)
    missing = len(batches) * 5 - sequences
    assert all(batch.tokens_BT.shape == (5, 32) for batch in batches)
    assert not batches[-1].segments_BT[-missing:].any()
    assert not batches[-1].weights_BT[-missing:].any()


@pytest.mark.parametrize(("limit", "rows"), [(1, 1), (5, 5), (10**6, None)])
def test_evaluation_limit(corpus, limit, rows):
    options = {"split": "train", "sequence_length": 32, "batch_size": 4}
    everything = list(evaluation_batches(corpus, **options))
    limited = list(evaluation_batches(corpus, **options, limit=limit))
    real = [row for batch in limited for row in batch.segments_BT if row.any()]
    assert len(real) == (rows or num_sequences(corpus, "train", 32))
    chex.assert_trees_all_equal(
        [b.tokens_BT[:1] for b in limited], [b.tokens_BT[:1] for b in everything[: len(limited)]]
    )


def test_batches_have_the_types_of_the_model(corpus):
    (batch,) = training_batches(corpus, num_steps=1)
    for name, array in vars(batch).items():
        assert isinstance(array, np.ndarray)
        assert array.shape == (4, 32)
        assert array.dtype == (np.float32 if name == "weights_BT" else np.int32)


@pytest.mark.parametrize("first_step", [1, 3, 40, 1000])
def test_resumed_run_reads_what_the_undisturbed_one_does(corpus, first_step):
    undisturbed = training_batches(corpus)
    expected = _take(_from(undisturbed, first_step), 5)
    undisturbed.close()
    resumed = list(training_batches(corpus, first_step=first_step, num_steps=5))
    chex.assert_trees_all_equal(resumed, expected)


def _from(iterator, start):
    for _ in range(start):
        next(iterator)
    yield from iterator


def test_two_loaders_agree_and_another_seed_does_not(corpus):
    first = list(training_batches(corpus, num_steps=8))
    chex.assert_trees_all_equal(first, list(training_batches(corpus, num_steps=8)))
    assert _rows(first) != _rows(training_batches(corpus, seed=8, first_step=0, num_steps=8))


def test_position_does_not_depend_on_the_batch_size(corpus):
    small = _rows(training_batches(corpus, batch_size=2, first_step=6, num_steps=6))
    large = _rows(training_batches(corpus, batch_size=6, first_step=2, num_steps=2))
    assert small == large


def test_every_epoch_has_every_window_once_in_another_order(corpus):
    sequences = num_sequences(corpus, "train", 32)
    rows = _rows(training_batches(corpus, batch_size=1, first_step=0, num_steps=3 * sequences))
    epochs = [rows[i * sequences : (i + 1) * sequences] for i in range(3)]
    in_order = _rows(evaluation_batches(corpus, split="train", sequence_length=32, batch_size=1))
    assert all(sorted(epoch) == sorted(in_order) for epoch in epochs)
    orders = [*epochs, in_order]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_batch_larger_than_the_corpus_repeats_it(corpus):
    sequences = num_sequences(corpus, "train", 32)
    (batch,) = training_batches(corpus, batch_size=2 * sequences + 1, num_steps=1)
    rows, counts = np.unique(batch.tokens_BT, axis=0, return_counts=True)
    assert len(rows) == sequences
    assert sorted(counts)[:-1] == [2] * (sequences - 1)


def test_threads_end_with_a_loop_that_stops_early(corpus):
    batches = training_batches(corpus)
    next(batches)
    assert _prefetch_threads()
    batches.close()
    deadline = time.monotonic() + 10
    while _prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _prefetch_threads()


def _prefetch_threads():
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_damage_after_opening_is_not_read_as_text(corpus, tmp_path, texts):
    source = tmp_path / "source"
    source.mkdir()
    for name, text in texts.items():
        (source / name).write_text(text, encoding="utf-8")
    damaged = build_corpus(
        tmp_path / "damaged", source=str(source), tokenizer=ByteTokenizer(), block_tokens=BLOCK,
        validation_percent=30,
    )  # fmt: skip
    (path,) = damaged.shard_paths("validation")
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Exception, match=r"(?i)corrupt|hash|mismatch|invalid"):
        list(evaluation_batches(damaged, split="validation", sequence_length=32, batch_size=4))


@pytest.mark.parametrize("sequence_length", [33, 48, 96])
def test_sequence_length_that_fits_no_blocks(corpus, sequence_length):
    with pytest.raises(ValueError, match=f"{sequence_length}, and .* has blocks of 64 tokens; one must be a"):
        training_batches(corpus, sequence_length=sequence_length, first_step=0)


def test_split_shorter_than_a_sequence(corpus):
    length = 2**16
    with pytest.raises(
        ValueError, match=r"the validation split of .* tokens; it must have at least one full"
    ):
        evaluation_batches(corpus, split="validation", sequence_length=length, batch_size=1)
    with pytest.raises(ValueError, match=f"{length}, and the train split"):
        training_batches(corpus, sequence_length=length, first_step=0)


def test_negative_step(corpus):
    with pytest.raises(ValueError, match="first_sequence is -4; it must be 0 or above"):
        training_batches(corpus, first_step=-1)
