"""What goes along with weights: tokenizer files, the numbers of special tokens, a card.

In a PyTorch folder they lie beside the weights; in a run folder in `tokenizer/`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from zaya_jax.config import Config, DataConfig, ModelConfig
from zaya_jax.convert.pytorch_folder import CONFIG, PytorchFolder
from zaya_jax.data.kept_tokenizer import FOLDER, as_kept
from zaya_jax.data.specials import BESIDE
from zaya_jax.data.tokenizer import BYTE_TOKENIZERS, ByteTokenizer, HuggingFaceTokenizer, special_names
from zaya_jax.data.tokenizer_files import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    as_json,
    begin_as_documents,
    begin_with,
    files_of,
    read_files,
    transformers_config,
)
from zaya_jax.json_files import parse_object, read_json
from zaya_jax.model.flops import active_parameters
from zaya_jax.model.weights import count_parameters

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
    files = read_files(folder.folder)
    ids = read_token_ids(folder.folder / CONFIG, folder.config)
    if GENERATION in files:
        read_token_ids(folder.folder / GENERATION, folder.config)  # goes along as it is
    story = (f"Converted from weights in the {folder.layout} layout.",)
    return Companions(_with_generation(files, ids), ids, story)


def of_run(folder: pathlib.Path, run: Config, *, step: int) -> Companions:
    """Those of a run: the files of its tokenizer, or files that say what its bytes are, and how it chats."""
    story = [f"Step {step:,} of a run of zaya_jax."]
    if step:
        tokens = step * run.data.batch_size * run.data.sequence_length
        story.append(
            f"Trained on {tokens:,} tokens, in sequences of {run.data.sequence_length:,} and batches of "
            f"{run.data.batch_size:,}; optimiser: {run.optimizer.name}."
        )
    companions = of_tokenizer(as_kept(folder, run.data), run.model, story=tuple(story))
    kept = folder / FOLDER
    if run.data.tokenizer not in BYTE_TOKENIZERS or not (kept / GENERATION).is_file():
        return companions
    # Of bytes the folder keeps no tokenizer, beside which these would have been found.
    files = companions.files | read_files(kept)
    return dataclasses.replace(
        companions, files=files, token_ids=read_token_ids(kept / GENERATION, run.model)
    )


def of_tokenizer(data: DataConfig | None, config: ModelConfig, *, story: tuple[str, ...]) -> Companions:
    """Those of the tokenizer of a run; of none where its file is gone.

    Raises:
      ValueError: if a special token that is named beside it is none of the network's.
    """
    if data is None:
        return Companions({}, dict.fromkeys(TOKEN_IDS), story)
    if data.tokenizer in BYTE_TOKENIZERS:
        ids: dict[str, Any] = {field: getattr(ByteTokenizer, _attribute(field)) for field in TOKEN_IDS}
        return Companions(_with_generation(_byte_files(BYTE_TOKENIZERS[data.tokenizer]), ids), ids, story)
    files = files_of(data.tokenizer)
    ids = dict.fromkeys(TOKEN_IDS)
    if TOKENIZER in files:
        files, ids = _as_trained_with(files, data)
    if GENERATION in files:
        ids = read_token_ids(pathlib.Path(data.tokenizer).parent / GENERATION, config)
    return Companions(_with_generation(files, ids), ids, story)


def _as_trained_with(files: dict[str, bytes], data: DataConfig) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files of a tokenizer with which transformers begins a text as the run's documents did."""
    tokenizer = HuggingFaceTokenizer(data.tokenizer, special_names(data))
    ids = {field: getattr(tokenizer, _attribute(field)) for field in TOKEN_IDS}
    found = parse_object(files[TOKENIZER_CONFIG], TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else None
    config = _tokenizer_config(files[TOKENIZER], ids) if found is None else found
    specials = dataclasses.asdict(tokenizer.specials)
    unsaid = {
        f"{name}_token": each["token"]
        for name, each in specials.items()
        if each is not None and each["rule"] not in BESIDE
    }
    raw, config = begin_as_documents(files[TOKENIZER], config | unsaid, tokenizer.borders.first_id)
    as_they_are = {TOKENIZER_CONFIG: files[TOKENIZER_CONFIG]} if config == found else {}
    return files | {TOKENIZER: raw, TOKENIZER_CONFIG: as_json(config)} | as_they_are, ids


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
    tokenizer.post_processor = begin_with("<bos>", kind.bos_id)  # type: ignore
    text = tokenizer.to_str().encode()
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return {TOKENIZER: text, TOKENIZER_CONFIG: as_json(_tokenizer_config(text, ids))}


def _tokenizer_config(tokenizer_json: bytes, ids: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    known = [field for field in TOKEN_IDS if isinstance(ids[field], int)]
    return transformers_config(**{field[:-3]: tokenizer.id_to_token(ids[field]) for field in known})


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
