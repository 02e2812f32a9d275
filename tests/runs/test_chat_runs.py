"""Training on chats: packed chats equal single ones, and a trained run answers."""

import dataclasses
import functools
import json
import random

import jax
import numpy as np
import optax
import pytest
from small_models import EXECUTION, SMALL
from small_runs import build_small_corpus, small_values

from zaya_jax import cli
from zaya_jax.checkpoint import load_run
from zaya_jax.config import BalancingConfig, Config
from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.chats.packed_windows import window_of_bytes, window_to_bytes
from zaya_jax.data.chats.packing import best_fit_decreasing
from zaya_jax.data.chats.templates.encoding import EncodedChat, load_chat_format
from zaya_jax.data.tokenizers.saved_tokenizer import saved_chat_template
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.engine.generate import generate
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import declare, flatten_weights, initialize
from zaya_jax.model.zaya import Zaya
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.partition import make_partition
from zaya_jax.options import load_config
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.step.state import TrainSetup, first_state
from zaya_jax.train.step.train_step import train_step
from zaya_jax.train.trainer import train

TOKENIZER = load_tokenizer("byte-chat")
ROWS, LENGTH = 8, 32
# With plain gradient descent the update is the gradient.
SETUP = TrainSetup(
    Zaya(SMALL, EXECUTION),
    make_partition(declare(SMALL), 1),
    optax.sgd(1.0),
    make_balancer(BalancingConfig(learning_rate=1e-2)),
)


@functools.cache
def compiled_step():
    return jax.jit(functools.partial(train_step, setup=SETUP, mesh=data_mesh(jax.devices()[:1])))


def random_chats():
    """Chats of all lengths, including one token and a whole window; some begin with learned tokens."""
    numbers = np.random.default_rng(0)
    return [
        EncodedChat(numbers.integers(1, SMALL.vocab_size, n).astype(np.int32), numbers.random(n) < 0.6)
        for n in (32, 1, 5, 9, 17, 20, 2, 11)
    ]


def batch_of(windows):
    """Puts each window in a row; remaining rows are padding."""
    rows = [
        window_of_bytes(
            window_to_bytes(chats, length=LENGTH, pad_id=0, dtype="<u2"), length=LENGTH, pad_id=0, dtype="<u2"
        )
        for chats in [*windows, *[[]] * (ROWS - len(windows))]
    ]
    return jax.tree.map(lambda *each: np.stack(each), *rows)


@pytest.mark.slow
def test_packed_chats_have_the_loss_and_gradients_of_single_ones():
    """Up to rounding: no token depends on another chat by attention, convolution or position."""
    chats = random_chats()
    packed = [[chats[i] for i in window] for window in best_fit_decreasing([*map(len, chats)], LENGTH)]
    assert len(packed) < len(chats) // 2 + 1
    single, together = batch_of([[chat] for chat in chats]), batch_of(packed)
    state = jax.jit(
        lambda: first_state(SETUP, initialize(declare(SMALL), jax.random.key(0)), jax.random.key(1))
    )()
    (expected, expected_metrics), (actual, metrics) = (
        compiled_step()(state, each) for each in (single, together)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    assert metrics.num_targets == expected_metrics.num_targets > 30
    close(metrics.loss, expected_metrics.loss)
    close(metrics.gradient_norm, expected_metrics.gradient_norm)
    jax.tree.map(close, actual.buckets, expected.buckets)
    np.testing.assert_array_equal(metrics.router_counts_LX, expected_metrics.router_counts_LX)
    # Without delimiters the comparison must fail.
    one_segment = dataclasses.replace(together, segments_BT=np.minimum(together.segments_BT, 1))
    _, mixed = compiled_step()(state, one_segment)
    assert abs(mixed.loss - expected_metrics.loss) > 1e-3


def write_chats(path, num):
    """Questions with random answers: each must be memorized."""
    numbers = random.Random(0)
    asked = {f"What is {i * 37 % 101}?": "".join(numbers.choices("abcdefgh", k=6)) for i in range(num)}
    lines = [
        json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]})
        for q, a in asked.items()
    ]
    path.write_text("\n".join(lines))
    return asked


def build_chats(folder, num, *, length):
    """Builds a corpus of `num` chats and a held-out one; returns the questions and answers."""
    folder.mkdir()
    asked = write_chats(folder / "chats.jsonl", num + 1)
    report = build_chat_corpus(
        folder / "corpus",
        source=folder / "chats.jsonl",
        tokenizer=TOKENIZER,
        sequence_length=length,
        validation_percent=1,
    )
    assert report.corpus.validation.documents == 1
    return asked


def answered(run_folder, asked):
    """Returns the questions that a run answers exactly, including the end of the turn."""
    run, chat_format = load_run(str(run_folder)), load_chat_format(saved_chat_template(run_folder), TOKENIZER)
    texts = generate(
        Zaya(run.config.model, run.config.execution),
        run.variables,
        [chat_format.prompt(question) for question in asked],
        max_new_tokens=8,
        eos_id=chat_format.end_id,
    )
    expected = [[*TOKENIZER.encode(answer), chat_format.end_id] for answer in asked.values()]
    return [question for question, text, e in zip(asked, texts, expected, strict=True) if text == e]


@pytest.mark.campaign
def test_a_run_memorizes_chats(tmp_path, capsys):
    asked = build_chats(tmp_path / "chats", 8, length=64)
    values = small_values(run_folder=str(tmp_path / "run"), corpus=str(tmp_path / "chats/corpus"))
    values["model"]["initializer_range"] = 0.05
    values["data"] |= {"tokenizer": "byte-chat", "batch_size": 8}
    values["optimizer"]["learning_rate"] = 1e-2
    values["train"] |= {"num_steps": 120, "eval_every": 120, "checkpoint_every": 120}
    train(Config.from_dict(values))
    right = answered(tmp_path / "run", asked)
    assert len(right) == 8  # all but the one that was held out
    capsys.readouterr()
    cli.main(["generate", str(tmp_path / "run"), "--chat", "--prompt", right[0], "--temperature", "0"])
    assert capsys.readouterr().out == f"{asked[right[0]]}\n"


NETWORK = (
    "model.hidden_size=64", "model.num_hidden_layers=2", "model.num_experts=4", "model.head_dim=16",
    "model.moe_intermediate_size=64", "data.sequence_length=128", "data.batch_size=8",
    "train.sample_tokens=0", "train.eval_every=1000", "train.checkpoint_every=1000",
    "model.vocab_size=264", "data.tokenizer_vocab_size=None",
)  # fmt: skip
MANY_EXPERTS = (
    *NETWORK, "model.num_hidden_layers=4", "model.num_experts=16", "model.moe_intermediate_size=128",
)  # fmt: skip
WARM_UP = "optimizer.warmup_steps=5"


def load(name, run_folder, overrides):
    options = [f"--config.{each}" for each in (f"run_folder={run_folder}", *overrides)]
    return load_config(f"configs/{name}.py", options)


def train_base(folder, network, *, num_steps):
    """A run on ordinary text, briefly trained: it knows letters, but no chats."""
    build_small_corpus(folder / "texts")
    texts = ["data.source=None", "data.tokenizer=byte", f"data.corpus={folder / 'texts'}"]
    train(load("tiny", folder / "base", [*network, *texts, f"train.num_steps={num_steps}", WARM_UP]))


def train_on_chats(folder, network, *options):
    """Returns the config of 50 chats, and how many of them the run answers exactly."""
    asked = build_chats(folder / "chats", 50, length=128)
    chats = [f"data.corpus={folder / 'chats/corpus'}", "data.tokenizer=byte-chat"]
    chats += [f"train.init_from={folder / 'base'}", "optimizer.learning_rate=1e-2", *options]
    config = load("sft", folder / "sft", [*network, *chats])
    train(config)
    return config, len(answered(folder / "sft", asked))


@pytest.mark.campaign  # minutes: two runs, the second of more than a hundred steps
def test_an_instruction_run_memorizes_50_chats(tmp_path):
    train_base(tmp_path, NETWORK, num_steps=20)
    _, right = train_on_chats(tmp_path, NETWORK, "train.num_steps=120")
    assert right == 50  # all but the one that was held out


@pytest.mark.campaign
def test_adapters_of_two_percent_memorize_50_chats(tmp_path):
    """Adapters of attention and router, in a network whose experts have most weights, as in ZAYA1."""
    train_base(tmp_path, MANY_EXPERTS, num_steps=40)
    lora = ("lora.rank=8", "lora.alpha=32", "optimizer.weight_decay=0.0", "train.num_steps=800")
    config, right = train_on_chats(tmp_path, MANY_EXPERTS, *lora)
    weights = flatten_weights(declare_run(config)).values()
    assert sum(w.size for w in weights if w.trains) < 0.02 * sum(w.size for w in weights)
    assert right == 50
