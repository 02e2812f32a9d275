"""Runs that take seconds: a generated corpus of Python-like text, and a config for it."""

import pathlib
import random

import jax
import numpy as np

from zaya_jax.checkpoint import Checkpoints, Retention, run_lock
from zaya_jax.checkpoint.format.layout import COMMITTED, MANIFEST
from zaya_jax.checkpoint.format.manifest import commit, sync_and_describe
from zaya_jax.config import Config, DataConfig, FieldChange, MixtureConfig
from zaya_jax.data.chats.templates.template import load_template
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.data.reading.mixture import Mixture, MixturePosition, make_orders
from zaya_jax.data.reading.order import Position
from zaya_jax.data.tokenizers.saved_tokenizer import save_tokenizer
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from zaya_jax.files import durable
from zaya_jax.model.weights import abstract_variables
from zaya_jax.train.setup import prepare_folder

BLOCK_TOKENS = 256
NAMES = ("left", "right", "total", "index", "value", "é")


def write_texts(folder: pathlib.Path, *, num_files: int = 24) -> None:
    """Writes about 50 KB of text, the same on every machine."""
    numbers = random.Random(0)
    folder.mkdir(parents=True)
    for i in range(num_files):
        functions = []
        for _ in range(40):
            a, b = numbers.choice(NAMES), numbers.choice(NAMES)
            functions.append(
                f"def f{numbers.randrange(100)}({a}):\n    {b} = {a} + {numbers.randrange(10)}\n"
            )
        (folder / f"text{i}.py").write_text("".join(functions), encoding="utf-8")


def build_small_corpus(folder: pathlib.Path, *, num_files: int = 24) -> Corpus:
    """Builds the corpus of `write_texts`, with the texts in a neighboring folder."""
    texts = folder.with_name(folder.name + "_texts")
    write_texts(texts, num_files=num_files)
    return build_corpus(
        folder,
        source=str(texts),
        tokenizer=ByteTokenizer(),
        block_tokens=BLOCK_TOKENS,
        validation_percent=20,
    )


def small_values(*, run_folder: str, corpus: str) -> dict:
    """Returns a config with all parts of the model, as plain values."""
    return {
        "run_folder": run_folder,
        "model": {
            "vocab_size": 264,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 2,
            "router_hidden_size": 8,
            "layer_pattern": ("hybrid_sliding", "hybrid"),
            "sliding_window": 16,
            "max_position_embeddings": 512,
        },
        "data": {"corpus": corpus, "source": None, "sequence_length": 64, "batch_size": 4},
        "optimizer": {"warmup_steps": 4, "learning_rate": 3e-3},
        "train": {
            "num_steps": 30,
            "log_every": 1,
            "eval_every": 10,
            "checkpoint_every": 4,
            "sample_tokens": 0,
        },
        "execution": {"dtype": "float32"},
    }


def small_config(*, run_folder: pathlib.Path, corpus: pathlib.Path) -> Config:
    return Config.from_dict(small_values(run_folder=str(run_folder), corpus=str(corpus)))


def make_base(folder: pathlib.Path, values: dict) -> dict:
    """Writes a run folder whose weights differ from any initialization."""
    config, numbers = Config.from_dict(values), np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jax.device_put((0.3 * numbers.standard_normal(x.shape)).astype(np.float32)),
        abstract_variables(config.model),
    )
    # The skip class as in the released weights: transformers supports no other bias.
    bias_LX = 0.1 * weights["router_bias"]["layers"]
    weights = weights | {"router_bias": {"layers": bias_LX.at[:, -1].set(-1.0)}}
    folder.mkdir()
    (folder / "config.json").write_text(config.to_text())
    with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(1, weights=weights, training={"step": np.int32(1)})
    return jax.device_get(weights)


def make_chat_run(folder: pathlib.Path) -> None:
    """Writes a run that appears to be trained on chats."""
    values = small_values(run_folder=str(folder), corpus="corpus")
    values["data"]["tokenizer"] = "byte-chat"
    make_base(folder, values)
    template = load_template("zaya", load_tokenizer("byte-chat")).text
    save_tokenizer(folder, Config.from_dict(values).data, chat_template=template)


def write_committed_step(run_folder: pathlib.Path, step: int) -> None:
    """Writes as much of a checkpoint as marks it as existing and intact."""
    folder = run_folder / f"checkpoints/{step}"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights/_METADATA").write_text("{}")
    commit_folder(folder, step)


def commit_folder(folder: pathlib.Path, step: int) -> None:
    """Writes the manifest of a step's folder for its current content."""
    names = set(durable.list_files(folder)) - {MANIFEST, COMMITTED}
    commit(folder, step, sync_and_describe(folder, names))


def prepare_run_folder(config: Config, *, step: int = 0, overwrite: bool) -> list[FieldChange]:
    """Calls `prepare_run` for a run that then ends."""
    with run_lock(config.run_folder) as lock:
        return prepare_folder(config, lock, step=step, overwrite=overwrite)


def reading_from_the_start(
    corpora: dict[str, Corpus], *, length: int, seed: int = 0, weights: tuple[int, ...] = (1,)
) -> MixturePosition:
    """Returns the state of a run of one phase before its first step."""
    names = tuple(corpora)
    named = MixtureConfig(name="m", corpora=names, weights=tuple(map(float, weights)))
    data = DataConfig(mixtures=(named,), mixture="m", sequence_length=length)
    return MixturePosition(
        orders=make_orders([data], {name: c.train.tokens for name, c in corpora.items()}, seed=seed),
        positions=dict.fromkeys(names, Position()),
        mixture=Mixture(names, weights),
        first_sequence=0,
        length=length,
    )
