import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from zaya_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

_SPECIALS = ["<pad>", "<eos>", "<bos>"]
_TEXTS = [
    "",
    "a",
    "def f(x):\n    return x\n",
    "  two  spaces ",
    "naïve Σ 漢字 🦓",
    "\x00\r\n\t",
    "<eos><bos>",
]


def _save(tokenizer, path):
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def byte_level_path(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(x): return x", "naïve Σ 漢字 naïve Σ 漢字"] * 5, trainer)
    tokenizer.add_tokens(["é  "])
    return _save(tokenizer, tmp_path / "byte_level.json")


@pytest.fixture
def sentencepiece_path(tmp_path):
    """As Gemma's: spaces become U+2581, and what has no token falls back to bytes."""
    pieces = [*_SPECIALS, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "é", "漢", "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([*_SPECIALS, "<unk>"])
    return _save(tokenizer, tmp_path / "sentencepiece.json")


@pytest.fixture(params=["byte", "byte_level", "sentencepiece"])
def tokenizer(request):
    if request.param == "byte":
        return load_tokenizer("byte")
    return load_tokenizer(request.getfixturevalue(f"{request.param}_path"))


@pytest.mark.parametrize("text", _TEXTS)
def test_decode_gives_back_what_was_encoded(tokenizer, text):
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", _TEXTS)
def test_token_bytes_add_up_to_the_text(tokenizer, text):
    bytes_V = tokenizer.token_bytes()
    assert bytes_V.shape == (tokenizer.vocab_size,)
    assert bytes_V.dtype == np.int32
    assert bytes_V[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))


def test_specials_are_never_encoded_stand_for_nothing_and_are_dropped(tokenizer):
    specials = [tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id]
    assert not set(specials) & set(tokenizer.encode("<pad> <eos> <bos>"))
    assert tokenizer.token_bytes()[specials].tolist() == [0, 0, 0]
    ids = tokenizer.encode("a")
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == "a"


def test_a_prompt_may_spell_specials(tokenizer):
    ids = tokenizer.encode("<bos>a<eos><pad>", specials=True)
    assert ids == [tokenizer.bos_id, *tokenizer.encode("a"), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.encode("<bos>a") != tokenizer.encode("<bos>a", specials=True)


def test_half_a_character_decodes_to_the_replacement_character(tokenizer):
    ids = tokenizer.encode("🦓")
    assert len(ids) == 4
    assert "\ufffd" in tokenizer.decode(ids[:2])


@pytest.mark.parametrize("seed", range(5))
def test_byte_tokenizer_round_trips_any_bytes(seed):
    raw = np.random.default_rng(seed).bytes(257)
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_bytes(raw)
    assert ids == [b + 3 for b in raw]
    assert tokenizer.encode(raw.decode("utf-8", "surrogateescape")) == ids
    assert tokenizer.decode(ids) == raw.decode("utf-8", "replace")


def test_byte_tokenizer_encodes_a_lone_surrogate_and_ignores_ids_beyond_its_own():
    tokenizer = ByteTokenizer()
    assert len(tokenizer.encode("\ud800")) == 3
    assert tokenizer.decode([*tokenizer.encode("ab"), 259, 1000]) == "ab"


def test_byte_level_tokens_count_bytes_and_not_characters(byte_level_path):
    tokenizer = HuggingFaceTokenizer(byte_level_path)
    (token,) = tokenizer.encode("é  ")
    assert tokenizer.token_bytes()[token] == 4
    assert tokenizer.token_bytes()[: len(_SPECIALS)].tolist() == [0, 0, 0]


def test_fingerprint_follows_the_content_and_not_the_place(byte_level_path, sentencepiece_path, tmp_path):
    copy = tmp_path / "copy.json"
    shutil.copy(byte_level_path, copy)
    fingerprint = load_tokenizer(byte_level_path).fingerprint
    assert load_tokenizer(str(copy)).fingerprint == fingerprint
    assert load_tokenizer(sentencepiece_path).fingerprint != fingerprint


def test_missing_file():
    with pytest.raises(ValueError, match=r'no tokenizer "nowhere\.json"; it must be "byte" or the path'):
        load_tokenizer("nowhere.json")


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff"])
def test_file_that_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is not a Hugging Face tokenizer\.json: "):
        load_tokenizer(str(path))
