import jax
import numpy as np
import pytest

from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import PADDING, Batch, make_example

PAD, EOS, BOS, NONE = 0, 1, 2, PADDING
WITH_BOS = DocumentDelimiters(bos_id=BOS, eos_id=EOS, pad_id=PAD)
SEPARATOR = DocumentDelimiters(bos_id=None, eos_id=EOS, pad_id=EOS)


def _example(tokens, delimiters=WITH_BOS):
    return make_example(np.array(tokens), delimiters=delimiters)


def _check(example, **expected):
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(example, name), values, err_msg=name)


def test_window_that_starts_in_a_document_and_ends_in_padding():
    example = _example([8, 9, EOS, BOS, 7, EOS, BOS, EOS, NONE, NONE])
    _check(
        example,
        tokens_BT=[8, 9, EOS, BOS, 7, EOS, BOS, EOS, PAD, PAD],
        targets_BT=[9, EOS, BOS, 7, EOS, BOS, EOS, PAD, PAD, PAD],
        weights_BT=[1, 1, 0, 1, 1, 0, 1, 0, 0, 0],
        positions_BT=[0, 1, 2, 0, 1, 2, 0, 1, 0, 0],
        segments_BT=[1, 1, 1, 2, 2, 2, 3, 3, 0, 0],
    )


@pytest.mark.parametrize("bos_id", [None, EOS])
def test_one_token_between_documents_ends_one_and_starts_the_other(bos_id):
    """Real tokens never count as padding, nor the reverse, even if padding has the id of a real token."""
    delimiters = DocumentDelimiters(bos_id=bos_id, eos_id=EOS, pad_id=EOS)
    _check(
        _example([8, 9, EOS, 7, EOS, EOS, NONE, NONE], delimiters),
        tokens_BT=[8, 9, EOS, 7, EOS, EOS, EOS, EOS],
        targets_BT=[9, EOS, 7, EOS, EOS, EOS, EOS, EOS],
        weights_BT=[1, 1, 1, 1, 1, 0, 0, 0],
        positions_BT=[0, 1, 0, 1, 0, 0, 0, 0],
        segments_BT=[1, 1, 2, 2, 3, 4, 0, 0],
    )


def test_a_document_may_contain_the_padding_token():
    example = _example([BOS, PAD, 5, NONE])
    _check(example, tokens_BT=[BOS, PAD, 5, PAD], weights_BT=[1, 1, 0, 0], segments_BT=[1, 1, 1, 0])


@pytest.mark.parametrize("delimiters", [WITH_BOS, SEPARATOR])
def test_documents_between_their_delimiters(delimiters):
    stream = [*delimiters.opening, *delimiters.wrap([7, 8]), *delimiters.wrap([])]
    assert stream == ([BOS, 7, 8, EOS, BOS, EOS] if delimiters.has_bos else [EOS, 7, 8, EOS, EOS])
    assert delimiters.begin([7]) == stream[:2]


def test_window_that_starts_with_a_document_and_cuts_it():
    example = _example([BOS, 5, 6, 7])
    _check(example, weights_BT=[1, 1, 1, 0], positions_BT=[0, 1, 2, 3], segments_BT=[1, 1, 1, 1])


def test_window_of_padding_alone():
    example = _example([NONE] * 3)
    _check(example, targets_BT=[PAD] * 3, weights_BT=[0] * 3, positions_BT=[0] * 3, segments_BT=[0] * 3)


@pytest.mark.parametrize("last", [PAD, EOS, BOS, 5])
def test_last_position_has_no_target(last):
    example = _example([BOS, last])
    assert example.weights_BT[-1] == 0
    assert example.targets_BT[-1] == PAD


def test_types_and_unchanged_window():
    tokens_T = np.array([BOS, 5, EOS, 6], np.uint16)
    example = make_example(tokens_T, delimiters=WITH_BOS)
    types = {name: array.dtype.name for name, array in vars(example).items() if array is not None}
    assert types == {
        "tokens_BT": "int32",
        "targets_BT": "int32",
        "weights_BT": "float32",
        "positions_BT": "int32",
        "segments_BT": "int32",
    }
    assert tokens_T.tolist() == [BOS, 5, EOS, 6]


def test_rows_of_a_batch_are_examples():
    tokens_BT = np.random.default_rng(0).integers(1, 6, (5, 40))  # many BOS and EOS
    batch = make_example(tokens_BT, delimiters=WITH_BOS)
    for b, tokens_T in enumerate(tokens_BT):
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(lambda x, b=b: x[b], batch), _example(tokens_T)
        )


def test_batch_is_a_pytree_of_arrays_or_shapes():
    batch = _example([[BOS, 5], [6, EOS]])
    shapes = jax.tree.map(lambda x: x.shape, batch)
    assert isinstance(shapes, Batch)
    assert shapes.tokens_BT == (2, 2)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    assert names == [".tokens_BT", ".targets_BT", ".weights_BT", ".positions_BT", ".segments_BT"]
    abstract = jax.eval_shape(lambda b: b, batch)
    assert abstract.weights_BT.dtype == np.float32
    microbatches = jax.jit(lambda b: jax.tree.map(lambda x: x.reshape(2, 1, 2), b))(batch)
    np.testing.assert_array_equal(microbatches.tokens_BT, [[[BOS, 5]], [[6, EOS]]])
