"""Random tokenizer folders yield the same ids as transformers' AutoTokenizer."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from tokenizer_folders import LETTERS, TEXTS, Folder, harmless, hostile_texts, write_folder

from zaya_jax.config import DataConfig, ModelConfig
from zaya_jax.convert.companion_files import of_tokenizer
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import ChatFormat, load_chat_format
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.held_out_bytes import DTYPE, FILE, held_out_text_bytes
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError

transformers = pytest.importorskip("transformers")

CONFIG = ModelConfig(vocab_size=1024)
SPELLS = ("BPE", "Unigram")
"""Models that spell unknown text by letters."""
QUICK, ALL = range(10), range(10, 200)


def check(folder: Folder) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder.reference)
    ours = load_tokenizer(str(folder.path / "tokenizer.json"))
    assert ours.eos_id == theirs.eos_token_id
    assert set(folder.special) <= ours.special_ids.keys()
    hostile = hostile_texts(folder.special)
    for text in (*TEXTS, *hostile, "".join(hostile)):
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert ours.encode(text, specials=True) == expected["input_ids"], (folder.description, text)
        places = [
            (i, *span) for i, span in zip(expected["input_ids"], expected["offset_mapping"], strict=True)
        ]
        assert list(ours.encode_with_places(text)) == places, (folder.description, text)
    for text in filter(lambda text: harmless(text, folder.special), TEXTS):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == expected, (folder.description, text)
    documents = list(ours.encode_documents([*TEXTS, *hostile]))
    assert [each.tolist() for each in documents] == [ours.encode(text) for text in [*TEXTS, *hostile]]
    if ours.kind in SPELLS and theirs.decode(theirs.encode(LETTERS, add_special_tokens=False)) == LETTERS:
        for text in (f"a{name}b" for name in folder.special if name.isascii()):
            assert ours.decode(ours.encode(text)) == text, folder.description
    special = set(ours.special_ids.values()) | set(theirs.all_special_ids)
    unknown = theirs.backend_tokenizer.token_to_id("<unk>")
    for text, ids in zip((*TEXTS, *hostile), documents, strict=True):
        assert special.isdisjoint(set(ids.tolist()) - {unknown}), (folder.description, text)


def check_export(folder: Folder) -> None:
    """Exported files yield the same ids, without settings for batches."""
    data = DataConfig(tokenizer=str(folder.path / "tokenizer.json"))
    ours, exported = load_tokenizer(data.tokenizer), folder.path / "exported"
    exported.mkdir()
    for name, content in of_tokenizer(data, CONFIG, story=()).files.items():
        (exported / name).write_bytes(content)
    fields = json.loads((exported / "tokenizer.json").read_text())
    assert fields["truncation"] is fields["padding"] is fields["model"].get("dropout") is None
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    alone = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    for text in (*TEXTS, *hostile_texts(folder.special)):
        expected = ours.encode(text, specials=True)
        assert theirs.encode(text) == ours.delimiters.begin(expected), (folder.description, text)
        assert alone.encode(text, add_special_tokens=False).ids == expected, (folder.description, text)


def check_bytes(folder: Folder) -> None:
    """The bytes of held-out tokens add up to the files, whatever the tokenizer does to a text."""
    texts = folder.path / "texts"
    texts.mkdir()
    for i, text in enumerate(TEXTS):
        (texts / f"{i}.txt").write_bytes(text.encode())
    tokenizer = load_tokenizer(str(folder.path / "tokenizer.json"))
    corpus = build_corpus(
        folder.path / "corpus", source=str(texts), tokenizer=tokenizer, block_tokens=16, validation_percent=50
    )
    total = sum(file.stat().st_size for file in texts.iterdir())
    held_out, bytes_N = corpus.validation, np.fromfile(corpus.folder / FILE, DTYPE)
    assert corpus.train.text_bytes + held_out.text_bytes == total
    assert (len(bytes_N), bytes_N.sum()) == (held_out.tokens, held_out.text_bytes), folder.description
    assert held_out_text_bytes(corpus, held_out.tokens - 1) == held_out.text_bytes


TEMPLATE = """\
{{- eos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""Turns end with EOS, which every folder has; `<|im_start|>` is a token in some folders."""


def conversations(texts: Sequence[str]) -> list[list[dict[str, str]]]:
    """A user message and an answer; several turns; and an answer at the end of the chat."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [turns[:2], turns[:3], turns[: len(turns) // 2 * 2]]


def check_chats(folder: Folder) -> None:
    """Chats have the same tokens as in transformers, and no user text becomes a special token."""
    (folder.path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(folder.reference)
    theirs.chat_template = TEMPLATE
    clean = conversations([text for text in TEXTS if harmless(text, folder.special)])
    expected = [theirs.apply_chat_template(each, return_dict=False) for each in clean]
    tokenizer = load_tokenizer(str(folder.path / "tokenizer.json"))
    numbers = [ids.count(theirs.eos_token_id) - len(each) for ids, each in zip(expected, clean, strict=True)]
    if min(numbers) < 1:  # EOS is not a token directly after a word there, so that a turn has no end
        with pytest.raises(UserError, match="special token"):
            load_chat_format(None, tokenizer)
        return
    chat_format = load_chat_format(None, tokenizer)
    for each, ids in zip(clean, expected, strict=True):
        encoded = chat_format.encode([Message(**turn) for turn in each])
        assert encoded.tokens_T.tolist() == ids, (folder.description, each)
    special = set(tokenizer.special_ids.values()) - {theirs.backend_tokenizer.token_to_id("<unk>")}
    for roles in (("user",), ("user", "assistant", "user")):
        allowed = count(chat_format, special, roles, "a")
        for text in hostile_texts(folder.special)[:: 1 if len(roles) == 1 else 7]:
            assert count(chat_format, special, roles, text) <= allowed, (folder.description, roles, text)


def count(chat_format: ChatFormat, special: set[int], roles: Sequence[str], text: str) -> int:
    """Special tokens of a chat in which every message is the same."""
    tokens_T = chat_format.encode([Message(role, text) for role in roles]).tokens_T
    return int(np.isin(tokens_T, list(special)).sum())


@pytest.mark.parametrize("seed", QUICK)
def test_a_folder_is_read_as_transformers_reads_it(seed, tmp_path):
    folder = write_folder(tmp_path, seed)
    check(folder)
    check_export(folder)
    check_bytes(folder)
    check_chats(folder)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", ALL)
def test_many_folders_are_read_as_transformers_reads_them(seed, tmp_path):
    folder = write_folder(tmp_path, seed)
    check(folder)
    check_export(folder)
    check_bytes(folder)
    check_chats(folder)
