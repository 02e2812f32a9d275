"""Random folders of tokenizers: models, normalizers, splits and special tokens in every combination.

Each is a real tokenizer, trained here by the `tokenizers` package. The truth is what `AutoTokenizer` makes of
it.
"""

import dataclasses
import json
import pathlib
import random
import unicodedata
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "the cat sat on the mat.  The dog did not.\n",
    "def f(x):\n    return x + 10\n",
    "naïve Σ 漢字 🦓 \t end é ﬁne Ⅷ\n",
    " leading and trailing ",
    "a",
    "x < y > z / w | v _ u [ t ] s LOT PES k",
    "yes no yes no 1234567890 tool",
    "über straße Ünïcödé \uff26\uff35",
)
SPECIAL = (
    "<s>",
    "</s>",
    "<pad>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "[SEP]",
    "<end_of_turn>",
    "<é>",
    "TOOL",
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_LETTERS = pre_tokenizers.ByteLevel.alphabet()
_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder of a tokenizer.

    Attributes:
      path: of the folder.
      reference: the same folder without dropout, which transformers obeys.
      special: special tokens that its files declare.
      description: what was chosen.
    """

    path: pathlib.Path
    reference: pathlib.Path
    special: tuple[str, ...]
    description: str


def write_folder(root: pathlib.Path, seed: int) -> Folder:
    """Writes a random folder."""
    draw = random.Random(seed)
    kind = draw.choice(("byte level", "metaspace bpe", "unigram", "word piece", "word level"))
    made: Any = _untrained(kind, draw)
    # Some special tokens are also pieces of the model, as in files that SentencePiece made.
    of_model = draw.sample(SPECIAL[4:], draw.randrange(4))
    made = _trained(made, kind, ["<unk>", "</s>", *of_model], draw)
    declared, files = _declare(made, draw)
    fields = json.loads(made.to_str())
    _set_flags(fields, draw)
    _add_batch_settings(fields, draw)
    folder = Folder(
        root / f"{seed}", root / f"{seed} reference", declared, f"{seed}: {kind}, {_summary(fields)}"
    )
    for path in (folder.path, folder.reference):
        path.mkdir(parents=True)
        for name, values in files.items():
            (path / name).write_text(json.dumps(values))
        (path / "tokenizer.json").write_text(json.dumps(fields))
        fields["model"].pop("dropout", None)
    return folder


def _summary(fields: dict[str, Any]) -> str:
    return f"{json.dumps(fields['normalizer'])[:200]}, {json.dumps(fields['pre_tokenizer'])[:200]}"


def _untrained(kind: str, draw: random.Random) -> tokenizers.Tokenizer:
    model = {
        "byte level": lambda: models.BPE(),
        "metaspace bpe": lambda: models.BPE(
            byte_fallback=draw.random() < 0.7, unk_token="<unk>", fuse_unk=True
        ),
        "unigram": lambda: models.Unigram(),
        "word piece": lambda: models.WordPiece(unk_token="<unk>"),
        "word level": lambda: models.WordLevel(unk_token="<unk>"),
    }[kind]()
    made: Any = tokenizers.Tokenizer(model)
    prefix = draw.random() < 0.3
    metaspace = {"prepend_scheme": draw.choice(("always", "first", "never")), "split": draw.random() < 0.6}
    made.normalizer = _normalizer(draw)
    match kind:
        case "byte level":
            made.pre_tokenizer, made.decoder = (
                pre_tokenizers.ByteLevel(add_prefix_space=prefix),
                decoders.ByteLevel(),
            )
            made.post_processor = processors.ByteLevel(trim_offsets=prefix)
        case "metaspace bpe":
            made.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace)
            made.decoder = decoders.Sequence(
                [decoders.ByteFallback(), decoders.Metaspace(**metaspace), decoders.Fuse()]
            )
        case "unigram":
            made.pre_tokenizer, made.decoder = (
                pre_tokenizers.Metaspace(**metaspace),
                decoders.Metaspace(**metaspace),
            )
        case "word piece":
            made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        case "word level":
            made.pre_tokenizer = draw.choice((pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()))
    return made


def _normalizer(draw: random.Random) -> Any:
    single = (
        normalizers.NFC(),
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        normalizers.Replace("§", "</s>"),
        normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        normalizers.Strip(),
    )
    count = draw.choice((0, 0, 1, 1, 2))
    chosen = draw.sample(single, count)
    return None if not chosen else chosen[0] if count == 1 else normalizers.Sequence(chosen)


def _trained(made: Any, kind: str, pieces: list[str], draw: random.Random) -> tokenizers.Tokenizer:
    common: dict[str, Any] = {"vocab_size": 400, "show_progress": False, "special_tokens": pieces}
    trainer = {
        "byte level": lambda: trainers.BpeTrainer(initial_alphabet=_LETTERS, **common),
        "metaspace bpe": lambda: trainers.BpeTrainer(**common),
        "unigram": lambda: trainers.UnigramTrainer(unk_token="<unk>", **common),
        "word piece": lambda: trainers.WordPieceTrainer(**common),
        "word level": lambda: trainers.WordLevelTrainer(**common),
    }[kind]()
    made.train_from_iterator(TEXTS * 3, trainer)
    fields = json.loads(made.to_str())
    fields["added_tokens"] = []  # pieces of the model only, until a file declares them
    if fields["model"].get("byte_fallback"):
        _add_bytes(fields["model"])
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


def _add_bytes(model: dict[str, Any]) -> None:
    for byte in range(256):
        model["vocab"].setdefault(f"<0x{byte:02X}>", len(model["vocab"]))


def _declare(made: tokenizers.Tokenizer, draw: random.Random) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Adds some special tokens to the tokenizer, and declares others in the files next to it."""
    own = draw.sample(SPECIAL, draw.randrange(len(SPECIAL)))
    made.add_tokens([_token(name, draw) for name in own])
    if draw.random() < 0.3:
        made.add_tokens([tokenizers.AddedToken("yes", single_word=draw.random() < 0.5)])
    beside = [name for name in SPECIAL if name not in own or draw.random() < 0.5]
    config: dict[str, Any] = dict(_CONFIG) | {"eos_token": "</s>"}
    files: dict[str, Any] = {"tokenizer_config.json": config}
    for field in draw.sample(list(NAMED), 3):
        place = config if draw.random() < 0.7 else files.setdefault("special_tokens_map.json", {})
        place[field] = draw.choice((NAMED[field], {"__type": "AddedToken", **_flags(NAMED[field], draw)}))
    extra = [name for name in beside if name not in NAMED.values()]
    _declare_extra(extra, made, config, files, draw)
    special = {token.content for token in made.get_added_tokens_decoder().values() if token.special}
    return tuple(sorted(special | _special_of(files))), files


def _declare_extra(
    extra: list[str],
    made: tokenizers.Tokenizer,
    config: dict[str, Any],
    files: dict[str, Any],
    draw: random.Random,
) -> None:
    match draw.choice(("decoder", "additional", "extra", "dict", "map", "older", "field", "none")):
        case "decoder":
            first = made.get_vocab_size() + draw.choice((0, 0, 5))
            config["added_tokens_decoder"] = {
                str(first + i): {"special": True} | _flags(name, draw) for i, name in enumerate(extra)
            }
        case "additional":
            config["additional_special_tokens"] = extra
        case "extra":
            config["extra_special_tokens"] = extra
        case "dict":
            config["extra_special_tokens"] = {f"token_{i}": name for i, name in enumerate(extra)}
        case "map":
            files.setdefault("special_tokens_map.json", {})["additional_special_tokens"] = extra
        case "older":
            size = made.get_vocab_size()
            files["added_tokens.json"] = {name: size + i for i, name in enumerate(extra)}
            config["additional_special_tokens"] = extra
        case "field":
            config |= {f"extra{i}_token": name for i, name in enumerate(extra)}


def _special_of(files: dict[str, Any]) -> set[str]:
    actual: set[str] = set()
    config, older = files["tokenizer_config.json"], files.get("special_tokens_map.json", {})
    read = config if "added_tokens_decoder" in config else config | older
    for field, value in read.items():
        if field.endswith("_token") and value:
            actual.add(value if isinstance(value, str) else value["content"])
        elif field.endswith("_special_tokens"):
            actual |= set(value.values() if isinstance(value, dict) else value)
        elif field == "added_tokens_decoder":
            actual |= {token["content"] for token in value.values() if token["special"]}
    return actual


def _flags(name: str, draw: random.Random) -> dict[str, Any]:
    chosen = {flag: draw.random() < 0.15 for flag in ("lstrip", "rstrip", "single_word")}
    return {"content": name, **chosen, "normalized": draw.random() < 0.4}


def _token(name: str, draw: random.Random) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(**_flags(name, draw), special=draw.random() < 0.7)


def _set_flags(fields: dict[str, Any], draw: random.Random) -> None:
    if fields["model"]["type"] == "BPE" and draw.random() < 0.4:
        fields["model"]["dropout"] = 0.3


def _add_batch_settings(fields: dict[str, Any], draw: random.Random) -> None:
    if draw.random() < 0.4:
        fields["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    if draw.random() < 0.4:
        fields["padding"] = {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "</s>",
        }  # fmt: skip


# Texts

LETTERS = "a<k/u|n>d_imf[tserpo]LOT PES k"
"""A text with every ASCII letter of the special tokens, but without a special token."""


def harmless(text: str, special: tuple[str, ...]) -> bool:
    """Whether a text spells no special token under any normalizer."""
    return not any(_folded(name) in _folded(text) for name in (*special, *SPECIAL))


def hostile_texts(special: tuple[str, ...]) -> list[str]:
    """Texts that spell special tokens, directly and in forms that a normalizer turns into them."""
    texts = ["§", "a§b"]
    for name in special:
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in name)
        for form in (
            name,
            wide,
            name.upper(),
            name.lower(),
            "́".join(name),
            unicodedata.normalize("NFD", name),
        ):
            texts += [form, f"a{form}b", f" {form} {form}{form}\n"]
    return texts


def _folded(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.replace("§", "</s>")).casefold()
    return "".join(c for c in decomposed if not unicodedata.combining(c)).replace(" ", "")
