"""Bits per byte of runs whose tokens do not spell the bytes of their texts, compared with file sizes."""

import hashlib
import json
import math
import pathlib

import pytest
from small_runs import small_values
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from zaya_jax.config import Config
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

TEXTS = [f"Ünit {i}:   the  sum   of {i} and {i * i}   is  {i + i * i}\n\n" * 6 for i in range(24)]
SPECIALS = ["<unk>", "</s>"]


def byte_fallback() -> Tokenizer:
    """A byte-level fallback whose vocabulary has no piece for a space's mark: three tokens per space."""
    bytes_used = sorted({byte for text in (*TEXTS, "▁") for byte in text.encode()})
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in bytes_used), *"theismofandu", "th"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, [("t", "h")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "▁")  # type: ignore
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # type: ignore
    return made


def squeezing_unigram() -> Tokenizer:
    """Several spaces become one, and letters lose their accents and case, as with SentencePiece's rules."""
    made = Tokenizer(models.Unigram())
    parts = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    made.normalizer = normalizers.Sequence([*parts, normalizers.Replace(Regex(r"\s{2,}"), " ")])  # type: ignore
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore
    made.decoder = decoders.Metaspace()  # type: ignore
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def held_out_size(texts: pathlib.Path, percent: int) -> int:
    """Returns the total size of the held-out files."""
    return sum(
        file.stat().st_size
        for file in texts.iterdir()
        if int.from_bytes(hashlib.blake2b(file.read_bytes(), digest_size=8).digest()) % 100 < percent
    )


@pytest.mark.campaign
@pytest.mark.parametrize("build", [byte_fallback, squeezing_unigram])
def test_a_run_reports_nats_by_the_bytes_of_its_held_out_files(build, tmp_path):
    made, folder, texts = build(), tmp_path / "tokenizer", tmp_path / "texts"
    folder.mkdir()
    made.add_special_tokens(SPECIALS)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    texts.mkdir()
    for i, text in enumerate(TEXTS):
        (texts / f"{i}.txt").write_text(text, encoding="utf-8")
    values = small_values(run_folder=str(tmp_path / "run"), corpus=str(tmp_path / "corpus"))
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    corpus = build_corpus(
        values["data"]["corpus"],
        source=str(texts),
        tokenizer=tokenizer,
        block_tokens=256,
        validation_percent=20,
    )
    values["data"]["tokenizer"] = tokenizer.name
    result = train(Config.from_dict(values))
    num_bytes, num_targets = held_out_size(texts, 20), corpus.validation.tokens - 1
    rows = list(read_metrics(values["run_folder"], "validation"))
    assert [row["step"] for row in rows] == [10, 20, 30]
    for row in rows:
        expected = row["loss"] * num_targets / math.log(2) / num_bytes
        assert row["bits_per_byte"] == pytest.approx(expected, rel=1e-9)
    assert result.validation_bits_per_byte == rows[-1]["bits_per_byte"]
