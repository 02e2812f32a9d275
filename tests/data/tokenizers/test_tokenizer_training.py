"""`zaya tokenizer`: training, the training texts, and the printed properties."""

import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as HuggingFace

from zaya_jax import cli
from zaya_jax.config import DataConfig
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.ensure import ensure_corpus, ensure_tokenizer
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer

WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel")


@pytest.fixture(scope="module", name="source")
def fixture_source(tmp_path_factory):
    """Forty texts, each of which repeats a word of its own."""
    folder = tmp_path_factory.mktemp("source")
    for i in range(40):
        word = f"{WORDS[i % 8]}{WORDS[i // 8]}é"
        (folder / f"{i}.txt").write_text(f"{word} = {word}\n" * 20, encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"\xe9" * 100)
    return folder


def test_only_the_training_split_is_used(source, tmp_path):
    """The word of each held-out text is not a token, and the word of each other text is one."""
    options = {"source": str(source), "validation_percent": 30}
    made = train_tokenizer(tmp_path / "made", vocab_size=3000, **options)
    corpus = build_corpus(tmp_path / "corpus", tokenizer=ByteTokenizer(), block_tokens=64, **options)
    assert made.text_bytes == corpus.train.text_bytes
    tokenizer = load_tokenizer(str(made.file))
    words = [file.read_text(encoding="utf-8").split()[0] for file in source.glob("[0-9]*.txt")]
    whole = [word for word in words if len(tokenizer.encode(word)) == 1]
    assert len(whole) == corpus.train.documents
    assert len(words) - len(whole) == corpus.validation.documents > 5


def test_the_same_texts_yield_the_same_file(source, tmp_path):
    """In another process, with another number of threads and another hash seed of Python."""
    here = train_tokenizer(tmp_path / "here", source=str(source), vocab_size=350)
    command = f"tokenizer train {tmp_path}/there --source {source} --vocab-size 350"
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    words = [sys.executable, "-m", "zaya_jax.cli", *command.split()]
    subprocess.run(words, env=environment, check=True, timeout=120, stdout=subprocess.PIPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert here.vocab_size == 350


def test_special_tokens_have_the_first_numbers(source, tmp_path, capsys):
    cli.main(
        f"tokenizer train {tmp_path}/made --source {source} --chat --specials <tool> --vocab-size 300".split()
    )
    assert "made/tokenizer.json: 300 tokens, from 0.0 MB of text" in capsys.readouterr().out
    tokenizer = load_tokenizer(f"{tmp_path}/made/tokenizer.json")
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    ids = tokenizer.encode("".join([*CHAT_SPECIALS, "<tool>"]), specials=True)
    assert ids == [3, 4, 5, 6, 7]
    theirs = HuggingFace.from_file(f"{tmp_path}/made/tokenizer.json")
    assert theirs.encode("alpha").ids == tokenizer.delimiters.begin(tokenizer.encode("alpha"))


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "text.txt").write_text("abc " * 50)
    made = train_tokenizer(tmp_path / "made", source=str(tmp_path / "text.txt"), vocab_size=1000)
    assert made.text_bytes == 190
    assert made.vocab_size < 300  # there is nothing more to merge
    assert len(load_tokenizer(str(made.file)).encode(" abc")) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--vocab-size 258", "the vocabulary size is 258; it must be at least 259"),
        ("--specials <a> <a>", 'the special token "<a>" is empty or occurs twice'),
        ("--specials <eos>", 'the special token "<eos>" is empty or occurs twice'),
        ("--source nowhere", "nowhere does not exist; it must be a folder"),
        ("--source {source}/latin.txt", "latin.txt are without text (1 not UTF-8)"),
        ("--pattern latin.txt", "in {source} are without text (1 not UTF-8)"),
    ],
)
def test_invalid_trainings(options, sentence, source, tmp_path, capsys):
    words = f"tokenizer train {tmp_path}/made --source {source} {options}".format(source=source).split()
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert sentence.format(source=source) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept(source, tmp_path):
    options = {"source": str(source), "vocab_size": 300}
    folder = tmp_path / "made"
    before = train_tokenizer(folder, **options).file.read_bytes()
    with pytest.raises(ValueError, match="is already a tokenizer; --overwrite replaces it"):
        train_tokenizer(folder, **options)
    train_tokenizer(folder, source=str(source), vocab_size=310, overwrite=True)
    assert (folder / "tokenizer.json").read_bytes() != before
    (folder / "notes").write_text("mine")
    with pytest.raises(ValueError, match="has notes, which would be lost"):
        train_tokenizer(folder, **options, overwrite=True)


def test_a_run_trains_a_missing_tokenizer(source, tmp_path, capsys):
    """A run trains its tokenizer once, and never one that another config names."""
    data = DataConfig(
        corpus=str(tmp_path / "corpus"),
        source=str(source),
        tokenizer=str(tmp_path / "made/tokenizer.json"),
        tokenizer_vocab_size=300,
    )
    corpus = ensure_corpus(data)
    assert corpus.vocab_size == 300
    assert capsys.readouterr().out.count("trained ") == 1
    assert ensure_tokenizer(data).fingerprint == corpus.tokenizer_fingerprint
    assert "trained" not in capsys.readouterr().out
    there = str(tmp_path / "corpus")
    for other in (
        DataConfig(tokenizer=str(tmp_path / "other.json"), source=str(source), tokenizer_vocab_size=300),
        DataConfig(tokenizer=str(tmp_path / "x/tokenizer.json"), tokenizer_vocab_size=300, corpus=there),
        DataConfig(tokenizer=str(tmp_path / "x/tokenizer.json"), source=str(source)),
    ):
        with pytest.raises(ValueError, match=r"the tokenizer .* does not exist"):
            ensure_tokenizer(other)


def test_inspection_shows_detected_tokens_and_their_rules(source, tmp_path, capsys):
    train_tokenizer(tmp_path / "made", source=str(source), vocab_size=300)
    (tmp_path / "text").write_text("alpha = alpha\n")
    (tmp_path / "made/tokenizer_config.json").unlink()
    words = f"tokenizer inspect {tmp_path}/made/tokenizer.json --text {tmp_path}/text --pad-token <eos>"
    cli.main(words.split())
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert rows == [
        ["start with", "<bos>", "2", "a well-known name"],
        ["end with", "<eos>", "1", "a well-known name"],
        ["are padded with", "<eos>", "1", "data.pad_token"],
    ]
    assert "BPE, 300 tokens; the bytes of single tokens are known" in output
    assert "14 bytes in" in output
    assert "decoding returns the text unchanged" in output
