"""Small tokenizer files as different makers write them: real ones, trained here with the same package."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from zaya_jax.config import DataConfig

TEXTS = (
    "def f(x):\n    return x\n",
    "the cat sat on the mat.  The dog did not.",
    "naïve Σ 漢字 🦓 \t end\n",
    "<s> <|endoftext|> <|im_start|>user </s> <bos><eos> [SEP] [CLS] <end_of_page>",
    "a",
    " leading and trailing ",
    *(f"document {i} has the number {i * i}\n" * (i % 3 + 1) for i in range(14)),
)
"""Documents; one spells what other documents' borders are."""
_LETTERS = pre_tokenizers.ByteLevel.alphabet()
_REGEX = tokenizers.Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")


@dataclasses.dataclass(frozen=True)
class Maker:
    """A form of tokenizer.json and its neighboring files.

    Attributes:
      build: function that makes the tokenizer.
      bos: BOS token that must be found; None if there is none.
      eos: EOS token that must be found.
      pad: padding token that must be found.
      beside: files in the same folder, by name.
      names: config fields that a user must set.
      keeps: part of a text that survives encoding and decoding: "all", "all but a space" that is prepended to
        it, or "words".
    """

    build: Callable[[], tokenizers.Tokenizer]
    bos: str | None
    eos: str
    pad: str | None
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    keeps: str = "all"

    def write(self, folder: pathlib.Path) -> DataConfig:
        """Writes the files, and returns the data section of a config that names them."""
        folder.mkdir(parents=True)
        self.build().save(str(folder / "tokenizer.json"))
        for name, values in self.beside.items():
            (folder / name).write_text(json.dumps(values))
        return DataConfig(tokenizer=str(folder / "tokenizer.json"), **self.names)


def _byte_level(*specials: str, normalizer=None, splitting=None, post=None) -> tokenizers.Tokenizer:
    made: Any = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = splitting or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=_LETTERS, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens(list(specials))
    made.post_processor = post(made) if post else processors.ByteLevel(trim_offsets=False)
    return made


def _template(single: str, *tokens: str) -> Callable[[tokenizers.Tokenizer], Any]:
    return lambda made: processors.TemplateProcessing(
        single=single, special_tokens=[(token, made.token_to_id(token)) for token in tokens]
    )


def _sentencepiece(*specials: str, normalizer: Any, decoder: Any) -> tokenizers.Tokenizer:
    pieces = [*specials, *(f"<0x{b:02X}>" for b in range(256)), "▁", *"aehtucs", "th", "the", "▁the", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made: Any = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    made.normalizer, made.decoder = normalizer, decoder
    made.add_special_tokens(list(specials))
    first = next(token for token in ("<bos>", "<s>") if token in specials)
    made.post_processor = _template(f"{first} $A", first)(made)
    return made


def _unigram(*specials: str, post: Callable[[tokenizers.Tokenizer], Any]) -> tokenizers.Tokenizer:
    """Like T5's and XLM-R's: "</s>" is also a piece of the model, and the most likely one."""
    letters = sorted(set("".join(TEXTS)) - {" ", "\n", "\t"})
    pieces = [(token, 0.0) for token in specials] + [("▁", -2.0), ("▁the", -3.0), ("document", -4.0)]
    pieces += [(letter, -6.0) for letter in letters]
    made: Any = tokenizers.Tokenizer(models.Unigram(pieces, specials.index("<unk>"), False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(list(specials))
    made.post_processor = post(made)
    return made


def _word_piece() -> tokenizers.Tokenizer:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made: Any = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = _template("[CLS] $A [SEP]", "[CLS]", "[SEP]")(made)
    return made


def _words() -> tokenizers.Tokenizer:
    """Special tokens are ordinary words of the vocabulary; only another file in the folder declares them."""
    words = [
        "[PAD]",
        "[UNK]",
        "[EOS]",
        "[SEP]",
        *sorted({w for text in TEXTS for w in text.split()} - {"[SEP]"}),
    ]
    made: Any = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _clip() -> tokenizers.Tokenizer:
    made: Any = tokenizers.Tokenizer(models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    specials = ["<|startoftext|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=250, special_tokens=specials, end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = _template("<|startoftext|> $A <|endoftext|>", *specials)(made)
    return made


_SPACE = normalizers.Replace(" ", "▁")
_BYTES_BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_END = "<|endoftext|>"
_ADDED = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"

MAKERS = {
    "gpt2": Maker(
        lambda: _byte_level(_END), _END, _END, _END,
        {CONFIG: {"bos_token": _END, "eos_token": _END, "tokenizer_class": "GPT2Tokenizer"}},
    ),
    "gpt2 alone": Maker(lambda: _byte_level(_END), None, _END, _END),
    "qwen": Maker(
        lambda: _byte_level(
            _END, "<|im_start|>", "<|im_end|>",
            normalizer=normalizers.NFC(),
            splitting=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(_REGEX, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            ),
        ),
        None, "<|im_end|>", _END,
        {CONFIG: {
            "bos_token": None, "eos_token": "<|im_end|>", "pad_token": _END, "add_bos_token": False,
            "tokenizer_class": "Qwen2Tokenizer",
        }},
    ),
    "llama 3": Maker(
        lambda: _byte_level(
            "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
            post=lambda made: processors.Sequence(
                [
                    processors.ByteLevel(trim_offsets=False),
                    _template("<|begin_of_text|> $A", "<|begin_of_text|>")(made),
                ]
            ),
        ),
        "<|begin_of_text|>", "<|end_of_text|>", None,
        {CONFIG: {
            "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        }},
    ),
    "roberta": Maker(
        lambda: _byte_level(
            "<s>", "<pad>", "</s>", "<unk>",
            post=lambda made: processors.RobertaProcessing(
                ("</s>", made.token_to_id("</s>")), ("<s>", made.token_to_id("<s>")), trim_offsets=False
            ),
        ),
        "<s>", "</s>", "<pad>",
    ),
    "llama 2": Maker(
        lambda: _sentencepiece(
            "<unk>", "<s>", "</s>",
            normalizer=normalizers.Sequence([normalizers.Prepend("▁"), _SPACE]),
            decoder=decoders.Sequence([*_BYTES_BACK, decoders.Strip(" ", 1, 0)]),
        ),
        "<s>", "</s>", None,
        {CONFIG: {
            "bos_token": _ADDED | {"content": "<s>"}, "eos_token": _ADDED | {"content": "</s>"},
            "pad_token": None, "add_bos_token": True, "add_eos_token": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }},
        keeps="all but a space",
    ),
    "gemma": Maker(
        lambda: _sentencepiece(
            "<pad>", "<eos>", "<bos>", "<unk>", normalizer=_SPACE, decoder=decoders.Sequence(_BYTES_BACK)
        ),
        "<bos>", "<eos>", "<pad>",
    ),
    "t5": Maker(
        lambda: _unigram("<pad>", "</s>", "<unk>", post=_template("$A </s>", "</s>")),
        None, "</s>", "<pad>",
        {CONFIG: {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}},
        keeps="words",
    ),
    "xlm-r": Maker(
        lambda: _unigram("<s>", "<pad>", "</s>", "<unk>", post=_template("<s> $A </s>", "<s>", "</s>")),
        "<s>", "</s>", "<pad>",
        {MAP: {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}},
        keeps="words",
    ),
    "bert": Maker(_word_piece, "[CLS]", "[SEP]", "[PAD]", keeps="words"),
    "word level": Maker(
        _words, None, "[EOS]", "[PAD]",
        {MAP: {"eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}},
        keeps="words",
    ),
    "clip": Maker(_clip, "<|startoftext|>", _END, None, {CONFIG: {"pad_token": None}}, keeps="words"),
    "named by the user": Maker(
        lambda: _byte_level("<new_page>", "<end_of_page>"),
        "<new_page>", "<end_of_page>", None,
        names={"bos_token": "<new_page>", "eos_token": "<end_of_page>"},
    ),
}  # fmt: skip
"""By whose form it is."""
