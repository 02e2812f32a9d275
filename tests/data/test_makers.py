"""Tokenizers of many makers: what begins and ends their documents is found, and corpora give texts back."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from makers import MAKERS, TEXTS

from zaya_jax.config import DataConfig
from zaya_jax.data.corpus import build_corpus
from zaya_jax.data.ensure import open_corpus_for
from zaya_jax.data.loader import evaluation_batches
from zaya_jax.data.tokenizer import tokenizer_of
from zaya_jax.train.metrics import text_bytes
from zaya_jax.train.opening import _token_bytes

BLOCK = 32


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, texts):
    """The section of a config and the corpus of a maker."""
    root = tmp_path_factory.mktemp("makers")

    @functools.cache
    def make(name):
        data = MAKERS[name].write(root / name)
        corpus = build_corpus(
            root / f"{name} corpus",
            source=str(texts),
            tokenizer=tokenizer_of(data),
            block_tokens=BLOCK,
            validation_percent=40,
        )
        return data, corpus

    return make


def windows(corpus, split):
    return list(evaluation_batches(corpus, split=split, sequence_length=BLOCK, batch_size=3))


@pytest.mark.parametrize("name", MAKERS)
def test_special_tokens_are_found(name, made):
    maker, found = MAKERS[name], tokenizer_of(made(name)[0]).specials
    tokens = [each and each.token for each in (found.bos, found.eos, found.pad)]
    assert tokens == [maker.bos, maker.eos, maker.pad]


@pytest.mark.parametrize("name", MAKERS)
def test_documents_come_back(name, made):
    """From the batches of both splits, in whose stream only borders lie between documents."""
    data, corpus = made(name)
    tokenizer, borders, documents = tokenizer_of(data), corpus.borders, []
    for split in ("train", "validation"):
        batches = windows(corpus, split)
        tokens, segments = (
            np.concatenate([getattr(batch, field).ravel() for batch in batches])
            for field in ("tokens_BT", "segments_BT")
        )
        real = tokens[segments > 0]
        assert len(real) == corpus.split(split).tokens
        assert (tokens[segments == 0] == borders.pad_id).all()
        stream = real[len(borders.opening) :]
        pieces = np.split(stream, np.flatnonzero(stream == borders.eos_id) + 1)
        assert len(pieces.pop()) == 0, "a document lacks its end"
        assert all((piece[0] == borders.first_id) == borders.has_bos for piece in pieces)
        documents += [tokenizer.decode(piece.tolist()) for piece in pieces]
    kept = [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS]
    assert sorted(documents) == sorted(kept)
    if MAKERS[name].keeps != "words":
        assert kept == list(TEXTS)
    else:
        assert "document 3 has the number 9" in {text.strip() for text in kept}


@pytest.mark.parametrize("name", MAKERS)
def test_every_token_of_a_text_is_a_target_once(name, made):
    """And its bytes count, so that bits per byte are of the whole text."""
    data, corpus = made(name)
    split, borders, tokenizer = corpus.validation, corpus.borders, tokenizer_of(data)
    batches = windows(corpus, "validation")
    targets = np.concatenate([batch.targets_BT[batch.weights_BT > 0] for batch in batches])
    assert len(targets) == split.tokens - (split.documents if borders.has_bos else 1)
    assert (targets == borders.eos_id).sum() == split.documents
    bytes_V = tokenizer.token_bytes()
    assert (bytes_V is None) == (name in ("bert", "word level", "clip"))
    if bytes_V is not None:
        spaces = split.documents if MAKERS[name].keeps == "all but a space" else 0
        exact = MAKERS[name].keeps != "words"
        assert not exact or bytes_V[targets].sum() == split.text_bytes + spaces


@pytest.mark.parametrize("name", ["bert", "word level", "clip"])
def test_where_tokens_do_not_tell_their_bytes_those_of_the_split_add_up(name, made, capsys):
    data, corpus = made(name)
    bytes_V = _token_bytes(tokenizer_of(data), corpus.validation)
    assert "do not tell their bytes: in bits/byte each counts as" in capsys.readouterr().out
    batches = windows(corpus, "validation")
    counted = sum(text_bytes(batch.targets_BT, batch.weights_BT, bytes_V) for batch in batches)
    assert counted == pytest.approx(corpus.validation.text_bytes, rel=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_no_text_is_a_special_but_a_prompt_may_be(name, made):
    tokenizer = tokenizer_of(made(name)[0])
    specials = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} - {None}
    spelled = MAKERS[name].eos
    assert not specials & set(tokenizer.encode(f"the {spelled} cat {spelled}{spelled}"))
    assert tokenizer.encode(f"the {spelled} cat", specials=True).count(tokenizer.eos_id) == 1
    assert tokenizer.encode("the cat", specials=True) == tokenizer.encode("the cat")


def test_without_bos_a_segment_begins_with_the_end_before(made):
    """GPT-2's separator is the target of one document and the first input of the next."""
    _, corpus = made("gpt2")
    assert corpus.borders.opening == [corpus.eos_id] == [corpus.bos_id]
    batch = windows(corpus, "train")[0]
    tokens, segments, positions = batch.tokens_BT[0], batch.segments_BT[0], batch.positions_BT[0]
    borders = np.flatnonzero(tokens == corpus.eos_id)
    assert len(borders) > 1
    assert borders[0] == 0
    for place in borders[1:]:
        assert segments[place] == segments[place - 1] + 1
        assert positions[place] == 0
        assert batch.targets_BT[0, place - 1] == corpus.eos_id
        assert batch.weights_BT[0, place - 1] == batch.weights_BT[0, place] == 1


def test_a_corpus_with_other_borders_is_refused(made):
    data, corpus = made("qwen")
    assert open_corpus_for(str(corpus.folder), data) == corpus
    other = dataclasses.replace(data, eos_token="<|endoftext|>")
    with pytest.raises(ValueError, match=r"begins and ends documents with the tokens .* data\.eos_token"):
        open_corpus_for(str(corpus.folder), other)


def test_without_an_end_the_option_is_told(tmp_path):
    data = dataclasses.replace(
        MAKERS["named by the user"].write(tmp_path / "t"), bos_token=None, eos_token=None
    )
    with pytest.raises(
        ValueError, match=r"no special token that is known to end .*--config\.data\.eos_token="
    ):
        tokenizer_of(data)


def test_a_name_that_is_no_token(tmp_path):
    data = dataclasses.replace(MAKERS["gemma"].write(tmp_path / "t"), pad_token="<padding>")
    with pytest.raises(ValueError, match=r'data\.pad_token is "<padding>"; it must be a token of .*\.json'):
        tokenizer_of(data)


@pytest.mark.parametrize("value", [3, ["<bos>"], {"content": 1}])
def test_a_file_beside_it_that_names_no_text(value, tmp_path):
    data = MAKERS["gemma"].write(tmp_path / "t")
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps({"bos_token": value}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: bos_token has .* it must be text"):
        tokenizer_of(data)


def test_an_option_goes_before_files_and_files_before_names(tmp_path):
    data: DataConfig = MAKERS["roberta"].write(tmp_path / "t")
    assert tokenizer_of(data).specials.bos.rule == "a well-known name"
    (tmp_path / "t/tokenizer_config.json").write_text(
        '{"bos_token": "<unk>", "pad_token": null, "eos_token": null}'
    )
    found = tokenizer_of(data).specials
    assert (found.bos.token, found.bos.rule) == ("<unk>", "tokenizer_config.json")
    assert found.pad is None
    assert found.eos.token == "</s>"  # there must be one
    found = tokenizer_of(dataclasses.replace(data, bos_token="<s>")).specials
    assert (found.bos.token, found.bos.rule) == ("<s>", "data.bos_token")
