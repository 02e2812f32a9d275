"""Tokenizers of many makers: their document delimiters are detected, and corpora reproduce their texts."""

import dataclasses
import functools
import hashlib
import json

import numpy as np
import pytest
from makers import MAKERS, TEXTS

from zaya_jax.config import DataConfig
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.ensure import open_corpus_for
from zaya_jax.data.corpora.held_out_bytes import DTYPE, FILE, held_out_text_bytes
from zaya_jax.data.corpora.text_bytes import token_text_bytes
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.tokenizers.tokenizer import tokenizer_of
from zaya_jax.train.metrics.files import text_bytes

BLOCK, HELD_OUT_PERCENT = 32, 40


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, texts):
    """Data section and corpus of a maker's tokenizer."""
    root = tmp_path_factory.mktemp("makers")

    @functools.cache
    def make(name):
        data = MAKERS[name].write(root / name)
        corpus = build_corpus(
            root / f"{name} corpus",
            source=str(texts),
            tokenizer=tokenizer_of(data),
            block_tokens=BLOCK,
            validation_percent=HELD_OUT_PERCENT,
        )
        return data, corpus

    return make


def is_held_out(raw: bytes) -> bool:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest()) % 100 < HELD_OUT_PERCENT


def stream(corpus, split):
    batches = windows(corpus, split)
    tokens, segments = (
        np.concatenate([getattr(batch, field).ravel() for batch in batches])
        for field in ("tokens_BT", "segments_BT")
    )
    return tokens[segments > 0]


def windows(corpus, split):
    return list(evaluation_batches(corpus, split=split, sequence_length=BLOCK, batch_size=3))


@pytest.mark.parametrize("name", MAKERS)
def test_special_tokens_are_found(name, made):
    maker, actual = MAKERS[name], tokenizer_of(made(name)[0]).specials
    tokens = [each and each.token for each in (actual.bos, actual.eos, actual.pad)]
    assert tokens == [maker.bos, maker.eos, maker.pad]


@pytest.mark.parametrize("name", MAKERS)
def test_documents_round_trip(name, made):
    """Documents from the batches of both splits, separated only by delimiters."""
    data, corpus = made(name)
    tokenizer, delimiters, documents = tokenizer_of(data), corpus.delimiters, []
    for split in ("train", "validation"):
        batches = windows(corpus, split)
        tokens, segments = (
            np.concatenate([getattr(batch, field).ravel() for batch in batches])
            for field in ("tokens_BT", "segments_BT")
        )
        real = tokens[segments > 0]
        assert len(real) == corpus.split(split).tokens
        assert (tokens[segments == 0] == delimiters.pad_id).all()
        stream = real[len(delimiters.opening) :]
        pieces = np.split(stream, np.flatnonzero(stream == delimiters.eos_id) + 1)
        assert len(pieces.pop()) == 0, "a document lacks its end"
        assert all((piece[0] == delimiters.first_id) == delimiters.has_bos for piece in pieces)
        documents += [tokenizer.decode(piece.tolist()) for piece in pieces]
    kept = [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS]
    assert sorted(documents) == sorted(kept)
    if MAKERS[name].keeps != "words":
        assert kept == list(TEXTS)
    else:
        assert "document 3 has the number 9" in {text.strip() for text in kept}


@pytest.mark.parametrize("name", MAKERS)
def test_every_token_of_a_text_is_a_target_once(name, made):
    """The documents' bytes count completely, so that bits per byte refer to the whole text."""
    data, corpus = made(name)
    split, delimiters, tokenizer = corpus.validation, corpus.delimiters, tokenizer_of(data)
    batches = windows(corpus, "validation")
    targets = np.concatenate([batch.targets_BT[batch.weights_BT > 0] for batch in batches])
    assert len(targets) == split.tokens - (split.documents if delimiters.has_bos else 1)
    assert (targets == delimiters.eos_id).sum() == split.documents
    bytes_V = tokenizer.token_bytes()
    assert (bytes_V is None) == (name in ("bert", "word level", "clip"))
    if bytes_V is not None:
        spaces = split.documents if MAKERS[name].keeps == "all but a space" else 0
        exact = MAKERS[name].keeps != "words"
        assert not exact or bytes_V[targets].sum() == split.text_bytes + spaces


@pytest.mark.parametrize("name", MAKERS)
def test_bytes_of_tokens_add_up_to_the_files(name, made, texts):
    """Whatever a tokenizer does to a text, its bytes are kept: per token if held out, else over the split."""
    data, corpus = made(name)
    held_out = corpus.validation
    sizes = {path.read_bytes(): path.stat().st_size for path in texts.iterdir()}
    assert held_out.text_bytes + corpus.train.text_bytes == sum(sizes.values())
    assert (
        held_out_text_bytes(corpus, None)
        == held_out_text_bytes(corpus, held_out.tokens)
        == held_out.text_bytes
    )
    (bytes_N, tokens_N) = np.fromfile(corpus.folder / FILE, DTYPE), stream(corpus, "validation")
    assert len(bytes_N) == len(tokens_N) == held_out.tokens
    ends = np.flatnonzero(tokens_N == corpus.eos_id)[-held_out.documents :]
    of_documents = np.diff(np.cumsum(bytes_N)[ends], prepend=0)
    assert sorted(of_documents.tolist()) == sorted(size for raw, size in sizes.items() if is_held_out(raw))
    for num_tokens in (1, 7, BLOCK, 2 * BLOCK):
        assert held_out_text_bytes(corpus, num_tokens) == bytes_N[: num_tokens + 1].sum()
    bytes_V = token_text_bytes(tokenizer_of(data), corpus)
    batches = windows(corpus, "train")
    counted = sum(text_bytes(batch.targets_BT, batch.weights_BT, bytes_V) for batch in batches)
    assert counted == pytest.approx(corpus.train.text_bytes, rel=1e-12)


@pytest.mark.parametrize("name", ["bert", "word level", "clip"])
def test_in_an_older_corpus_the_bytes_of_the_split_add_up(name, made, capsys):
    data, corpus = made(name)
    train = dataclasses.replace(corpus.train, spelled_bytes=None)
    older = dataclasses.replace(corpus, train=train, files={})
    bytes_V = token_text_bytes(tokenizer_of(data), older)
    assert "does not define bytes per token: bits/byte uses" in capsys.readouterr().out
    batches = windows(corpus, "validation")
    counted = sum(text_bytes(batch.targets_BT, batch.weights_BT, bytes_V) for batch in batches)
    assert counted == pytest.approx(corpus.validation.text_bytes, rel=1e-12)
    assert held_out_text_bytes(older, None) == corpus.validation.text_bytes
    assert held_out_text_bytes(older, 8) is None


@pytest.mark.parametrize("name", MAKERS)
def test_only_prompts_can_contain_special_tokens(name, made):
    tokenizer = tokenizer_of(made(name)[0])
    specials = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} - {None}
    spelled = MAKERS[name].eos
    assert not specials & set(tokenizer.encode(f"the {spelled} cat {spelled}{spelled}"))
    assert tokenizer.encode(f"the {spelled} cat", specials=True).count(tokenizer.eos_id) == 1
    assert tokenizer.encode("the cat", specials=True) == tokenizer.encode("the cat")


def test_without_bos_a_segment_starts_with_the_previous_end(made):
    """GPT-2's separator is the target of one document and the first input of the next."""
    _, corpus = made("gpt2")
    assert corpus.delimiters.opening == [corpus.eos_id] == [corpus.bos_id]
    batch = windows(corpus, "train")[0]
    tokens, segments, positions = batch.tokens_BT[0], batch.segments_BT[0], batch.positions_BT[0]
    delimiters = np.flatnonzero(tokens == corpus.eos_id)
    assert len(delimiters) > 1
    assert delimiters[0] == 0
    for place in delimiters[1:]:
        assert segments[place] == segments[place - 1] + 1
        assert positions[place] == 0
        assert batch.targets_BT[0, place - 1] == corpus.eos_id
        assert batch.weights_BT[0, place - 1] == batch.weights_BT[0, place] == 1


def test_a_corpus_with_other_delimiters_is_rejected(made):
    data, corpus = made("qwen")
    assert open_corpus_for(str(corpus.folder), data) == corpus
    other = dataclasses.replace(data, eos_token="<|endoftext|>")
    with pytest.raises(ValueError, match=r"starts and ends documents with the tokens .* data\.eos_token"):
        open_corpus_for(str(corpus.folder), other)


def test_without_an_end_token_the_error_names_the_option(tmp_path):
    data = dataclasses.replace(
        MAKERS["named by the user"].write(tmp_path / "t"), bos_token=None, eos_token=None
    )
    with pytest.raises(
        ValueError, match=r"no special token that is known to end .*--config\.data\.eos_token="
    ):
        tokenizer_of(data)


def test_a_name_that_is_not_a_token(tmp_path):
    data = dataclasses.replace(MAKERS["gemma"].write(tmp_path / "t"), pad_token="<padding>")
    with pytest.raises(ValueError, match=r'data\.pad_token is "<padding>", which is not a token of .*\.json'):
        tokenizer_of(data)


@pytest.mark.parametrize("value", [3, ["<bos>"], {"content": 1}])
def test_a_neighboring_file_with_an_invalid_name(value, tmp_path):
    data = MAKERS["gemma"].write(tmp_path / "t")
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps({"bos_token": value}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: bos_token has .* it must be text"):
        tokenizer_of(data)


def test_options_precede_files_and_files_precede_names(tmp_path):
    data: DataConfig = MAKERS["roberta"].write(tmp_path / "t")
    assert tokenizer_of(data).specials.bos.rule == "a well-known name"
    (tmp_path / "t/tokenizer_config.json").write_text(
        '{"bos_token": "<unk>", "pad_token": null, "eos_token": null}'
    )
    actual = tokenizer_of(data).specials
    assert (actual.bos.token, actual.bos.rule) == ("<unk>", "tokenizer_config.json")
    assert actual.pad is None
    assert actual.eos.token == "</s>"  # BOS is required here
    actual = tokenizer_of(dataclasses.replace(data, bos_token="<s>")).specials
    assert (actual.bos.token, actual.bos.rule) == ("<s>", "data.bos_token")
