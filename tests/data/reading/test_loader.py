import itertools
import threading
import time

import chex
import numpy as np
import pytest
from small_runs import reading_from_the_start

from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.reading.loader import Share, evaluation_batches, num_sequences
from zaya_jax.data.reading.loader import training_batches as batches_of
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer

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


def training_batches(corpus, *, first_sequence=0, sequence_length=32, batch_size=4, seed=7, num_steps=None):
    """The position in a single corpus after a number of sequences of the same length."""
    reading = reading_from_the_start({"c": corpus}, length=sequence_length, seed=seed).after(first_sequence)
    return batches_of(reading, {"c": corpus}, batch_size=batch_size, num_steps=num_steps)


def _take(batches, count):
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def _rows(batches):
    return [row.tobytes() for batch in batches for row in batch.tokens_BT]


@pytest.mark.parametrize("sequence_length", [2, 32, 64, 128, 192])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_windows_contain_the_documents(corpus, texts, split, sequence_length):
    batches = evaluation_batches(corpus, split=split, sequence_length=sequence_length, batch_size=3)
    tokens = np.concatenate([batch.tokens_BT.ravel() for batch in batches])
    real = tokens[: corpus.split(split).tokens]
    assert (real != corpus.pad_id).all()
    assert (tokens[len(real) :] == corpus.pad_id).all()
    documents = np.split(real, np.flatnonzero(real == corpus.bos_id)[1:])
    decoded = [ByteTokenizer().decode(document.tolist()) for document in documents]
    assert len(decoded) == corpus.split(split).documents
    assert set(decoded) <= set(texts.values())


def test_both_splits_contain_all_documents(corpus):
    assert corpus.train.documents + corpus.validation.documents == 60


def test_evaluation_predicts_every_token_but_the_first_of_a_document(corpus):
    """The first token of a window is also predicted: it is the target of the last position of the previous
    one.
    """
    batches = list(evaluation_batches(corpus, split="validation", sequence_length=32, batch_size=5))
    predicted = sum(batch.weights_BT.sum() for batch in batches)
    assert predicted == corpus.validation.tokens - corpus.validation.documents
    sequences = num_sequences(corpus, "validation", 32)
    assert sequences % 5, "the last batch must be short for this test"
    assert len(batches) == -(-sequences // 5)
    missing = len(batches) * 5 - sequences
    assert all(batch.tokens_BT.shape == (5, 32) for batch in batches)
    assert not batches[-1].segments_BT[-missing:].any()
    assert not batches[-1].weights_BT[-missing:].any()


@pytest.mark.parametrize("sequence_length", [16, 64, 128])
def test_targets_follow_their_inputs_in_the_stream(corpus, sequence_length):
    """Sequences within a block, at its end, and over several blocks; also shuffled ones."""
    (everything,) = evaluation_batches(corpus, split="train", sequence_length=64, batch_size=10**3)
    stream = everything.tokens_BT.ravel()[: corpus.train.tokens]
    follows = {stream[i : i + 8].tobytes(): stream[i + 8] for i in range(len(stream) - 8)}
    num_steps = 2 * num_sequences(corpus, "train", sequence_length)
    checked = 0
    for batch in training_batches(corpus, sequence_length=sequence_length, batch_size=1, num_steps=num_steps):
        np.testing.assert_array_equal(batch.targets_BT[0, :-1], batch.tokens_BT[0, 1:])
        last = batch.tokens_BT[0, -8:]
        if list(stream).count(last[0]) and last.tobytes() in follows and is_once(stream, last):
            assert batch.targets_BT[0, -1] == follows[last.tobytes()]
            checked += 1
    assert checked > 10


def is_once(stream, tokens):
    windows = np.lib.stride_tricks.sliding_window_view(stream, len(tokens))
    return (windows == tokens).all(axis=1).sum() == 1


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
    absent = {"reference_BT", "labels_BT", "teacher_tokens_BTK", "teacher_log_probs_BTK", "origin_BC2"}
    assert {name for name, array in vars(batch).items() if array is None} == absent
    arrays = {name: array for name, array in vars(batch).items() if name not in absent}
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray)
        assert array.shape == (4, 32)
        assert array.dtype == (np.float32 if name == "weights_BT" else np.int32)


@pytest.mark.parametrize("first_sequence", [1, 3, 4, 12, 41, 163, 1000])
def test_a_run_resumed_anywhere_reads_the_same_batches(corpus, first_sequence):
    """Resuming within a former batch: batches of a ramp are smaller."""
    undisturbed = training_batches(corpus, batch_size=1)
    expected = _rows(_take(_from(undisturbed, first_sequence), 20))
    undisturbed.close()
    assert _rows(training_batches(corpus, first_sequence=first_sequence, num_steps=5)) == expected


def _from(iterator, start):
    for _ in range(start):
        next(iterator)
    yield from iterator


def test_two_loaders_agree_and_another_seed_does_not(corpus):
    first = list(training_batches(corpus, num_steps=8))
    chex.assert_trees_all_equal(first, list(training_batches(corpus, num_steps=8)))
    assert _rows(first) != _rows(training_batches(corpus, seed=8, num_steps=8))


def test_position_does_not_depend_on_the_batch_size(corpus):
    small = _rows(training_batches(corpus, batch_size=2, first_sequence=12, num_steps=6))
    large = _rows(training_batches(corpus, batch_size=6, first_sequence=12, num_steps=2))
    assert small == large


def test_every_epoch_has_every_window_once_in_another_order(corpus):
    sequences = num_sequences(corpus, "train", 32)
    rows = _rows(training_batches(corpus, batch_size=1, num_steps=3 * sequences))
    epochs = [rows[i * sequences : (i + 1) * sequences] for i in range(3)]
    in_order = _rows(evaluation_batches(corpus, split="train", sequence_length=32, batch_size=1))
    assert all(sorted(epoch) == sorted(in_order) for epoch in epochs)
    orders = [*epochs, in_order]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_no_epoch_of_a_seed_equals_one_of_the_next_seed(corpus):
    sequences = num_sequences(corpus, "train", 32)
    seeds = [
        _rows(training_batches(corpus, batch_size=1, seed=s, num_steps=4 * sequences)) for s in (7, 8, 9)
    ]
    epochs = [tuple(rows[i * sequences : (i + 1) * sequences]) for rows in seeds for i in range(4)]
    assert len(set(epochs)) == 12


def test_batch_larger_than_the_corpus_repeats_it(corpus):
    sequences = num_sequences(corpus, "train", 32)
    (batch,) = training_batches(corpus, batch_size=2 * sequences + 1, num_steps=1)
    rows, counts = np.unique(batch.tokens_BT, axis=0, return_counts=True)
    assert len(rows) == sequences
    assert sorted(counts)[:-1] == [2] * (sequences - 1)


def test_threads_end_with_a_loop_that_stops_early(corpus):
    others = (
        _prefetch_threads()
    )  # threads of a run that another test has ended with an error, which pytest keeps alive
    batches = training_batches(corpus)
    next(batches)
    assert _prefetch_threads() - others
    batches.close()
    deadline = time.monotonic() + 10
    while _prefetch_threads() - others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _prefetch_threads() - others


def _prefetch_threads():
    return {thread for thread in threading.enumerate() if "prefetch" in thread.name}


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
def test_sequence_length_that_does_not_fit_blocks(corpus, sequence_length):
    with pytest.raises(ValueError, match=f"{sequence_length}, but .* has blocks of 64 tokens; one must be a"):
        next(training_batches(corpus, sequence_length=sequence_length))


def test_split_shorter_than_a_sequence(corpus):
    length = 2**16
    with pytest.raises(
        ValueError, match=r"the validation split of .* tokens; it must have at least one full"
    ):
        evaluation_batches(corpus, split="validation", sequence_length=length, batch_size=1)
    with pytest.raises(ValueError, match=f"{length}, but the train split"):
        next(training_batches(corpus, sequence_length=length))


def test_rows_carry_their_global_index(corpus):
    """The second half of the rows, from a batch shortly before the index wraps."""
    reading = reading_from_the_start({"c": corpus}, length=32, seed=7)
    settings = {"batch_size": 4, "num_steps": 2, "share": Share(range(2, 4))}
    batches = list(batches_of(reading, {"c": corpus}, **settings, first_index=2**32 - 4))
    assert [batch.origin_BC2.tolist() for batch in batches] == [
        [[[2**32 - 2, 0]], [[2**32 - 1, 0]]],
        [[[2, 0]], [[3, 0]]],
    ]
    assert next(batches_of(reading, {"c": corpus}, **settings)).origin_BC2 is None
