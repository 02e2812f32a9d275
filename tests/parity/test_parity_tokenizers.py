"""transformers starts a text with the same tokens as we do, for tokenizers of all makers."""

import dataclasses
import json
import pathlib

import pytest
from makers import MAKERS, TEXTS
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from zaya_jax.config import DataConfig, ModelConfig
from zaya_jax.convert.companion_files import of_tokenizer
from zaya_jax.data.tokenizers.tokenizer import tokenizer_of
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer

CONFIG = ModelConfig(vocab_size=512)


def exported(data: DataConfig, folder: pathlib.Path) -> DataConfig:
    """Exports the tokenizer, and returns the data section of a config that reads it again."""
    folder.mkdir()
    for name, content in of_tokenizer(data, CONFIG, story=()).files.items():
        (folder / name).write_bytes(content)
    return dataclasses.replace(data, tokenizer=str(folder / "tokenizer.json"))


def assert_same_ids(data: DataConfig, folder: pathlib.Path) -> None:
    ours, again = tokenizer_of(data), tokenizer_of(exported(data, folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (again.bos_id, again.eos_id, again.pad_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert theirs.eos_token_id == ours.eos_id
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text)
        assert theirs.encode(text) == ours.delimiters.begin(ours.encode(text, specials=True))


@pytest.mark.parametrize("name", MAKERS)
def test_exported_tokenizers_begin_as_documents_do(name, tmp_path):
    assert_same_ids(MAKERS[name].write(tmp_path / "made"), tmp_path / "exported")


def test_the_byte_tokenizer_does(tmp_path):
    data = DataConfig()
    exported(data, tmp_path / "exported")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "exported"), tokenizer_of(data)
    for text in TEXTS:
        assert theirs.encode(text) == ours.delimiters.begin(ours.encode(text, specials=True))


@pytest.mark.parametrize("switch", ["add_eos_token", "add_bos_token"])
def test_settings_in_neighboring_files_override_nothing(switch, tmp_path):
    data = MAKERS["llama 3"].write(tmp_path / "made")
    file = tmp_path / "made/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {switch: switch == "add_eos_token"}))
    assert_same_ids(data, tmp_path / "exported")


def test_tokenizers_that_we_train_are_unchanged(tmp_path):
    """With each way to load one, so that a corpus for the exported tokenizer matches too."""
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / f"texts/{i}.txt").write_text(text, encoding="utf-8")
    source = str(tmp_path / "texts")
    made = train_tokenizer(tmp_path / "made", source=source, vocab_size=300, specials=CHAT_SPECIALS)
    data = DataConfig(tokenizer=str(made.file))
    assert_same_ids(data, tmp_path / "exported")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = tokenizer_of(data).delimiters.begin(tokenizer_of(data).encode(text, specials=True))
    assert ids[1] == 3
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        theirs = kind.from_pretrained(tmp_path / "made")
        assert theirs.encode(text) == ids
        assert theirs.decode(theirs.encode("the cat  sat\n"), skip_special_tokens=True) == "the cat  sat\n"
