"""Checks before a run starts: the embedding has a row for each token."""

import dataclasses
import json

import pytest
from makers import MAKERS

from zaya_jax.config import Config
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import write_manifest
from zaya_jax.data.tokenizers.tokenizer import tokenizer_of
from zaya_jax.errors import UserError
from zaya_jax.train.setup import _check_rows


@pytest.fixture
def declared(tmp_path):
    """Returns a data config whose tokens two files declare, and the tokenizer without the second file."""
    data = MAKERS["qwen"].write(tmp_path / "tokenizer")
    plain = tokenizer_of(data)
    file = tmp_path / "tokenizer/tokenizer_config.json"
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | {"extra_special_tokens": ["<tool>", "</tool>"]}))
    return dataclasses.replace(data, corpus=str(tmp_path / "corpus")), plain


def config_of(data, rows):
    values = {"model": {"vocab_size": rows}, "data": dataclasses.asdict(data)}
    return dataclasses.replace(Config.from_dict({"model": values["model"]}), data=data)


@pytest.mark.parametrize("lacking", [1, 2, 50])
def test_declared_tokens_need_rows(declared, lacking):
    data, plain = declared
    tokenizer = tokenizer_of(data)
    assert tokenizer.vocab_size == plain.vocab_size + 2
    _check_rows(tokenizer, config_of(data, tokenizer.vocab_size))
    sentence = (
        rf"{tokenizer.vocab_size} tokens, and each must have its row.*vocab_size={tokenizer.vocab_size}"
    )
    with pytest.raises(UserError, match=sentence):
        _check_rows(tokenizer, config_of(data, tokenizer.vocab_size - lacking))


def test_a_run_on_a_corpus_of_an_older_version_can_be_resumed(declared, tmp_path):
    """Such a corpus lacks the declared tokens, and so does the run's embedding."""
    data, plain = declared
    tokenizer, config = tokenizer_of(data), config_of(data, plain.vocab_size)
    (tmp_path / "text.txt").write_text("the cat sat\n" * 20)
    source = str(tmp_path / "text.txt")
    corpus = build_corpus(data.corpus, source=source, tokenizer=tokenizer, block_tokens=16)
    with pytest.raises(UserError, match="each must have its row"):
        _check_rows(tokenizer, config)
    fingerprint, size = plain.fingerprint, plain.vocab_size
    write_manifest(dataclasses.replace(corpus, tokenizer_fingerprint=fingerprint, vocab_size=size))
    _check_rows(tokenizer, config)
