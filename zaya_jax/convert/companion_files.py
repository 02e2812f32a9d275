"""Files that accompany weights: tokenizer files, ids of special tokens, a model card.

In a PyTorch folder they are next to the weights, in a run folder in `tokenizer/`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from zaya_jax.checkpoint import WeightsKind
from zaya_jax.config import Config, DataConfig, ModelConfig
from zaya_jax.convert.card_facts import facts_of_run, license_of
from zaya_jax.convert.model_card import CardFacts
from zaya_jax.convert.pytorch.folder import CONFIG, PytorchFolder
from zaya_jax.data.tokenizers.saved_tokenizer import with_saved_tokenizer
from zaya_jax.data.tokenizers.special_tokens import TOKEN_NAME_FILES
from zaya_jax.data.tokenizers.tokenizer import (
    BYTE_TOKENIZERS,
    ByteTokenizer,
    HuggingFaceTokenizer,
    byte_letters,
    special_names,
)
from zaya_jax.data.tokenizers.tokenizer_files import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    as_json,
    begin_as_documents,
    begin_with,
    files_of,
    read_files,
    transformers_config,
    without_batch_settings,
)
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import parse_object, read_json
from zaya_jax.run_folder.names import TOKENIZER_FOLDER

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Companions:
    """Files and values that accompany the weights of a model.

    Attributes:
      files: content of each file, by name.
      token_ids: ids of special tokens, by field in config.json; None for unknown ones.
      story: lines of the model card about the origin of the weights.
      facts: further contents of the model card.
    """

    files: dict[str, bytes]
    token_ids: dict[str, Any]
    story: tuple[str, ...]
    facts: CardFacts = dataclasses.field(default_factory=CardFacts)


def of_folder(folder: PytorchFolder) -> Companions:
    """Companions of the weights of a PyTorch folder."""
    # Truncation and padding saved by a trainer would silently cut texts in generation.
    files = without_batch_settings(read_files(folder.folder))
    ids = read_token_ids(folder.folder / CONFIG, folder.config)
    if GENERATION in files:
        read_token_ids(
            folder.folder / GENERATION, folder.config
        )  # validated only: the file is copied unchanged
    origin = f"{folder.revision}," if folder.revision is not None else "weights"
    story = (f"Converted from {origin} in the {folder.layout} layout.",)
    facts = CardFacts(license=license_of(folder.folder), base_model=folder.revision)
    return Companions(_with_generation(files, ids), ids, story, facts)


def of_run(folder: pathlib.Path, run: Config, *, step: int, weights: WeightsKind = "raw") -> Companions:
    """Companions of a run's weights: the files of its tokenizer and chat template."""
    average = "EMA of the weights at s" if weights == "ema" else "S"
    story = (f"{average}tep {step:,} of a run of zaya_jax.",)
    companions = of_tokenizer(with_saved_tokenizer(folder, run.data), run.model, story=story)
    facts = facts_of_run(folder, run, step=step, weights=weights)
    companions = dataclasses.replace(companions, facts=facts)
    saved = folder / TOKENIZER_FOLDER
    if run.data.tokenizer not in BYTE_TOKENIZERS or not (saved / GENERATION).is_file():
        return companions
    # A run on bytes has no tokenizer.json, next to which `of_tokenizer` would have found these files.
    files = companions.files | read_files(saved)
    return dataclasses.replace(
        companions, files=files, token_ids=read_token_ids(saved / GENERATION, run.model)
    )


def of_tokenizer(data: DataConfig | None, config: ModelConfig, *, story: tuple[str, ...]) -> Companions:
    """Companions of a tokenizer; without tokenizer files if its file is missing.

    Args:
      data: config of the tokenizer; None for weights without one.
      config: architecture, whose vocabulary the ids of special tokens must be in.
      story: lines of the model card about the origin of the weights.

    Raises:
      UserError: if the id of a special token is not in the vocabulary.
    """
    # Without a tokenizer the ids are null, and transformers uses none.
    if data is None:
        return Companions({}, dict.fromkeys(TOKEN_IDS), story)
    if data.tokenizer in BYTE_TOKENIZERS:
        ids: dict[str, Any] = {field: getattr(ByteTokenizer, _attribute(field)) for field in TOKEN_IDS}
        return Companions(_with_generation(_byte_files(BYTE_TOKENIZERS[data.tokenizer]), ids), ids, story)
    files = without_batch_settings(files_of(data.tokenizer))
    ids = dict.fromkeys(TOKEN_IDS)
    # The file may have been moved since; weights can be converted without it.
    if TOKENIZER in files:
        files, ids = _as_trained_with(files, data)
    if GENERATION in files:
        ids = read_token_ids(pathlib.Path(data.tokenizer).parent / GENERATION, config)
    return Companions(_with_generation(files, ids), ids, story)


def _as_trained_with(files: dict[str, bytes], data: DataConfig) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Tokenizer files with which transformers starts a text with the same token as the run's documents."""
    tokenizer = HuggingFaceTokenizer(data.tokenizer, special_names(data))
    ids = {field: getattr(tokenizer, _attribute(field)) for field in TOKEN_IDS}
    given = parse_object(files[TOKENIZER_CONFIG], TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else None
    config = _tokenizer_config(files[TOKENIZER], ids) if given is None else given
    # Names that the tokenizer files do not state, but the run used.
    specials = dataclasses.asdict(tokenizer.specials)
    unsaid = {
        f"{name}_token": each["token"]
        for name, each in specials.items()
        if each is not None and each["rule"] not in TOKEN_NAME_FILES
    }
    # Programs other than transformers read only tokenizer.json, so it must contain all tokens.
    is_complete = tokenizer.fingerprint == tokenizer.file_fingerprint
    raw = files[TOKENIZER] if is_complete else tokenizer.to_file()
    raw, config = begin_as_documents(raw, config | unsaid, tokenizer.delimiters.first_id)
    unchanged = {TOKENIZER_CONFIG: files[TOKENIZER_CONFIG]} if config == given else {}
    return files | {TOKENIZER: raw, TOKENIZER_CONFIG: as_json(config)} | unchanged, ids


def read_token_ids(file: pathlib.Path, config: ModelConfig) -> dict[str, Any]:
    """Reads the ids of special tokens in a config.json or generation_config.json; None for missing ones.

    Raises:
      UserError: for an invalid id; only `eos_token_id` may be a list.
    """
    # Both files are copied or merged into the output, so they are validated here.
    values = read_json(file)
    ids = {field: values.get(field) for field in TOKEN_IDS}
    for field, value in ids.items():
        may_be_several = field == "eos_token_id"
        tokens = value if may_be_several and isinstance(value, list) else [value]
        for token in tokens if value is not None else ():
            # `type` instead of `isinstance`, because bool is a subclass of int.
            if type(token) is not int or not 0 <= token < config.vocab_size:
                raise UserError(
                    f"{file}: {field} has {token!r:.80}; it must be an integer from 0 to "
                    f"{config.vocab_size - 1:,}{', a list of those' * may_be_several} or null"
                )
    return ids


def _attribute(field: str) -> str:
    return field.replace("_token", "")


def _with_generation(files: dict[str, bytes], ids: Mapping[str, Any]) -> dict[str, bytes]:
    """Adds a generation config if there is none, so that generation stops at the end token."""
    known = {name: value for name, value in ids.items() if value is not None}
    # An existing file has precedence, because users may have tuned it.
    return {GENERATION: as_json(known)} | files


def _byte_files(kind: type[ByteTokenizer]) -> dict[str, bytes]:
    """The byte tokenizer as a tokenizer.json: byte-level BPE without merges."""
    # Ids are offset by the 3 special tokens.
    letters = {letter: byte + 3 for letter, byte in byte_letters().items()}
    # Checks our table against that of the tokenizers package.
    assert letters.keys() == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**kind.special_ids, **letters}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore
    tokenizer.add_special_tokens(list(kind.special_ids))
    tokenizer.post_processor = begin_with("<bos>", kind.bos_id)  # type: ignore
    text = tokenizer.to_str().encode()
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return {TOKENIZER: text, TOKENIZER_CONFIG: as_json(_tokenizer_config(text, ids))}


def _tokenizer_config(tokenizer_json: bytes, ids: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    known = [field for field in TOKEN_IDS if isinstance(ids[field], int)]
    return transformers_config(**{field[:-3]: tokenizer.id_to_token(ids[field]) for field in known})
