"""What goes along with weights: tokenizer files, the numbers of special tokens, a card.

In a PyTorch folder they lie beside the weights; in a run folder in `tokenizer/`.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from zaya_jax.config import Config, ModelConfig
from zaya_jax.convert.pytorch_folder import CONFIG, PytorchFolder
from zaya_jax.data.tokenizer import BYTE_TOKENIZERS, ByteTokenizer, load_tokenizer
from zaya_jax.json_files import MAX_JSON_BYTES, read_json
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters

FOLDER = "tokenizer"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
FILES = (
    TOKENIZER, TOKENIZER_CONFIG, GENERATION, "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Companions:
    """What goes along with the weights of a network.

    Attributes:
      files: by name.
      token_ids: of special tokens, by their field in config.json; None where nobody knows.
      story: lines of the card: where the weights come from.
    """

    files: dict[str, bytes]
    token_ids: dict[str, Any]
    story: tuple[str, ...]


def of_folder(folder: PytorchFolder) -> Companions:
    """Those of a PyTorch folder."""
    files = _read_files(folder.folder)
    ids = read_token_ids(folder.folder / CONFIG, folder.config)
    if GENERATION in files:
        read_token_ids(folder.folder / GENERATION, folder.config)  # goes along as it is
    story = (f"Converted from weights in the {folder.layout} layout.",)
    return Companions(_with_generation(files, ids), ids, story)


def of_run(run: Config, *, step: int) -> Companions:
    """Those of a run: the files beside its tokenizer, or files that say what its bytes are."""
    story = [f"Step {step:,} of a run of zaya_jax."]
    if step:
        tokens = step * run.data.batch_size * run.data.sequence_length
        story.append(
            f"Trained on {tokens:,} tokens, in sequences of {run.data.sequence_length:,} and batches of "
            f"{run.data.batch_size:,}; optimiser: {run.optimizer.name}."
        )
    return of_tokenizer(run.data.tokenizer, run.model, story=tuple(story))


def of_tokenizer(name: str | None, config: ModelConfig, *, story: tuple[str, ...]) -> Companions:
    """Those of a tokenizer as `DataConfig.tokenizer` names it; of none where its file is gone.

    Raises:
      ValueError: if a special token that is named beside it is none of the network's.
    """
    if name is not None and name in BYTE_TOKENIZERS:
        ids: dict[str, Any] = {field: getattr(ByteTokenizer, _attribute(field)) for field in TOKEN_IDS}
        return Companions(_with_generation(_byte_files(BYTE_TOKENIZERS[name]), ids), ids, story)
    folder = pathlib.Path(name).parent if name is not None else None
    if name is None or folder is None or not folder.is_dir():
        return Companions({}, dict.fromkeys(TOKEN_IDS), story)
    files = _read_files(folder)
    if pathlib.Path(name).is_file():
        files[TOKENIZER] = pathlib.Path(name).read_bytes()
    ids = dict.fromkeys(TOKEN_IDS)
    if GENERATION in files:
        ids = read_token_ids(folder / GENERATION, config)
    elif TOKENIZER in files:
        tokenizer = load_tokenizer(name)
        ids = {field: getattr(tokenizer, _attribute(field)) for field in TOKEN_IDS}
    files = _with_generation(files, ids)
    if TOKENIZER in files and TOKENIZER_CONFIG not in files:
        files[TOKENIZER_CONFIG] = _tokenizer_config(files[TOKENIZER], ids)
    return Companions(files, ids, story)


def read_token_ids(file: pathlib.Path, config: ModelConfig) -> dict[str, Any]:
    """The numbers of special tokens in a config.json or generation_config.json; None for those that it lacks.

    Raises:
      ValueError: for what transformers would not take for one: only the end may be one of several.
    """
    values = read_json(file)
    ids = {field: values.get(field) for field in TOKEN_IDS}
    for field, value in ids.items():
        may_be_several = field == "eos_token_id"
        tokens = value if may_be_several and isinstance(value, list) else [value]
        for token in tokens if value is not None else ():
            if type(token) is not int or not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"{file}: {field} has {token!r:.80}; it must be a whole number from 0 to "
                    f"{config.vocab_size - 1:,}{', a list of such' * may_be_several} or null"
                )
    return ids


def _attribute(field: str) -> str:
    return field.replace("_token", "")


def _read_files(folder: pathlib.Path) -> dict[str, bytes]:
    found = {name: folder / name for name in FILES if (folder / name).is_file()}
    for file in found.values():
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file} has {file.stat().st_size:,} bytes; it may have {MAX_JSON_BYTES:,}")
    return {name: file.read_bytes() for name, file in found.items()}


def _with_generation(files: dict[str, bytes], ids: Mapping[str, Any]) -> dict[str, bytes]:
    """Adds a generation config where there is none: without it generation would not know its end."""
    known = {name: value for name, value in ids.items() if value is not None}
    return {GENERATION: as_json(known)} | files


def _byte_files(kind: type[ByteTokenizer]) -> dict[str, bytes]:
    """Our byte tokenizer as a tokenizer.json: byte-level BPE that never merges."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's: printable bytes are themselves
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(spelled.values()) == set(alphabet)
    vocabulary = {**kind.specials, **{spelled[byte]: byte + 3 for byte in range(256)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore
    tokenizer.add_special_tokens(list(kind.specials))
    text = tokenizer.to_str().encode()
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return {TOKENIZER: text, TOKENIZER_CONFIG: _tokenizer_config(text, ids)}


def _tokenizer_config(tokenizer_json: bytes, ids: Mapping[str, Any]) -> bytes:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    spelled = {
        field.removesuffix("_id"): tokenizer.id_to_token(ids[field])
        for field in TOKEN_IDS
        if isinstance(ids[field], int)
    }
    return as_json(
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | spelled
    )


def card(config: ModelConfig, companions: Companions, *, dtype: str, layout: str) -> bytes:
    """A model card with the facts that are known."""
    story = "\n".join(companions.story)
    load = (
        "Load it with `transformers.AutoModelForCausalLM.from_pretrained(FOLDER)` (5.13 or later), "
        if layout == "native"
        else "Load it with Zyphra's fork of transformers, "
    )
    rows = {
        "parameters": f"{count_parameters(config):,}",
        "active a token, without embedding": f"{active_parameters(config):,}",
        "layers": f"{config.num_hidden_layers}",
        "width": f"{config.hidden_size:,}",
        "query heads, key heads, head width": f"{config.num_attention_heads}, {config.num_key_value_heads}, "
        f"{config.head_dim}",
        "experts a layer, their width": f"{config.num_experts}, {config.moe_intermediate_size:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "longest sequence": f"{config.max_position_embeddings:,}",
        "type of the weights": f"{dtype}; balancing biases float32",
        "layout": layout,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\ntags: [zaya, mixture-of-experts, zaya_jax]\n---\n\n"
        f"# A ZAYA1 network\n\n{story}\n\n| | |\n|---|---|\n{table}\n\n"
        f"{load}or with `zaya_jax.load_pytorch(FOLDER)`. "
        "`sha256sum --check SHA256SUMS` tells whether the files are as they were written.\n"
    ).encode()


def as_json(value: Any) -> bytes:
    """JSON as files have it here."""
    return (json.dumps(value, indent=2) + "\n").encode()
