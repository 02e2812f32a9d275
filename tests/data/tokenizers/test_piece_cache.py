"""Cached pieces yield exactly the tokens that the tokenizer yields for each whole text."""

import functools
import random

import pytest
import tokenizers
from makers import MAKERS
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from zaya_jax.data.tokenizers import piece_cache
from zaya_jax.data.tokenizers.piece_cache import find_cuts
from zaya_jax.data.tokenizers.tokenizer import HuggingFaceTokenizer, load_tokenizer, tokenizer_of

FRAGMENTS = (
    *"aZé漢я09_'.,!?-(<>|▁\n\r\t\0\x1c\x85\xa0\u2028\u3000\u0301\u212b🦓",
    " ", " ", "  ", "    ", "\n\n", "\r\n", "the", " the", "don't", "'S", "'re", "x'll.", "12345", "foo(",
    "a  b", "<think>", "</think>", "<eos>", "<|x y|>", "\u2581\u2581", "=" * 40,
    "https://example.org/" + "q" * 40,
)  # fmt: skip
"""Fragments; combined at random, they contain every kind of character next to every other."""
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")


def texts(count, seed):
    numbers = random.Random(seed)
    return ["".join(numbers.choices(FRAGMENTS, k=numbers.randint(0, 60))) for _ in range(count)]


def split_by(regex):
    split = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def byte_level(splitting=None, *, normalizer=None, added=()):
    """A vocabulary with everything that its pre-tokenizer leaves together, including spaces and marks."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = splitting or pre_tokenizers.ByteLevel(False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts(400, seed=1), trainer)
    made.add_special_tokens(["<eos>", "<|x y|>"] if not added else ["<eos>"])
    made.add_tokens(list(added))
    return made


def marked(*more):
    """A tokenizer like Gemma's: nothing is split, and spaces are marks, which may repeat."""
    letters = sorted({letter for fragment in FRAGMENTS for letter in fragment} - {" "})
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("\n", "\n"), ("a", "▁")]
    merged = ["▁▁", "▁▁▁▁", "th", "the", "▁the", "\n\n", *more]
    pieces = ["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]
    used = [merge for merge in merges if "".join(merge) in pieces]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=used, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.add_special_tokens(["<eos>", "<unk>"])
    made.add_tokens(["<think>", "</think>"])
    return made


KINDS = {
    "gpt 2": (byte_level, piece_cache.WORDS),
    "llama 3": (lambda: byte_level(split_by(LLAMA_3)), piece_cache.WORDS),
    "qwen 2": (lambda: byte_level(split_by(QWEN_2), normalizer=normalizers.NFC()), piece_cache.WORDS),
    "qwen 3": (
        lambda: byte_level(split_by(QWEN_2), normalizer=normalizers.NFC(), added=("<think>", "</think>")),
        piece_cache.SPACED_WORDS,
    ),
    "gemma": (marked, piece_cache.MARKED_WORDS),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a tokenizer of a kind."""
    folder = tmp_path_factory.mktemp("tokenizers")

    @functools.cache
    def make(kind):
        file = folder / f"{kind}.json"
        KINDS[kind][0]().save(str(file))
        return load_tokenizer(str(file))

    return make


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def fields_of(tokenizer: HuggingFaceTokenizer):
    return tokenizer._fields


def assert_the_same(tokenizer, texts):
    for text, actual in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert actual.tolist() == tokenizer.encode(text), repr(text)


def test_texts_have_the_tokens_of_whole_texts(load, kind):
    tokenizer = load(kind)
    assert find_cuts(fields_of(tokenizer)) == KINDS[kind][1]
    assert_the_same(tokenizer, texts(1500, seed=2))


def test_pieces_cover_a_text(kind):
    cuts = KINDS[kind][1]
    for text in texts(300, seed=3):
        assert "".join(cuts.piece.findall(text)) == text
    text = "def f(self, x):\n    return self.g(x) + 1  # twice\n" * 9
    assert len(text) / len(cuts.piece.findall(text)) < 10


@pytest.mark.parametrize(("name", "value"), [("SLAB_CHARACTERS", 7), ("MAX_CACHE_BYTES", 400)])
def test_long_texts_in_slabs_and_a_full_cache(load, kind, monkeypatch, name, value):
    monkeypatch.setattr(piece_cache, name, value)
    assert_the_same(load(kind), ["".join(texts(40, seed=4)), *texts(100, seed=5)])


def test_the_cache_is_bounded(load, monkeypatch):
    monkeypatch.setattr(piece_cache, "MAX_CACHE_BYTES", 50_000)
    tokenizer = load("gpt 2")
    for i in range(40):
        list(tokenizer.encode_documents(f"word{i * 100 + j} " * 2 for j in range(100)))
        assert len(tokenizer._memory._known) < 400


def test_a_megabyte_without_a_space_takes_linear_time(kind):
    """Scanning again from each letter would take hours."""
    for text in ("é1," * 300_000, "-é" * 300_000, " " * 500_000 + "x", "a" * 500_000):
        assert "".join(KINDS[kind][1].piece.findall(text)) == text


def test_every_maker_has_the_tokens_of_whole_texts(tmp_path):
    for name, maker in MAKERS.items():
        assert_the_same(tokenizer_of(maker.write(tmp_path / name)), texts(60, seed=6))


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": {"max_length": 8}},
        {"padding": {"strategy": "BatchLongest"}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
)
def test_unknown_tokenizers_have_no_cuts(load, change):
    fields = fields_of(load("gpt 2"))
    assert find_cuts(fields) is not None
    assert find_cuts(fields | change) is None


def test_added_tokens_that_have_or_take_a_space(load):
    fields = fields_of(load("qwen 3"))
    plain = next(each for each in fields["added_tokens"] if not each["special"])
    for change in (
        {"content": "a<"},
        {"content": "< >"},
        {"lstrip": True},
        {"rstrip": True},
        {"single_word": True},
    ):
        assert find_cuts(fields | {"added_tokens": [plain]}) == piece_cache.SPACED_WORDS
        assert find_cuts(fields | {"added_tokens": [plain | change]}) is None


def test_a_token_across_a_space_leaves_texts_whole(tmp_path):
    file = tmp_path / "tokenizer.json"
    marked("a▁").save(str(file))
    tokenizer = load_tokenizer(str(file))
    assert find_cuts(fields_of(tokenizer)) is None
    assert_the_same(tokenizer, ["a b", "a  b", "a the"])
