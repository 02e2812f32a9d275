"""A small network is taught four tools on 200 conversations, and calls them with unseen arguments.

The base can already copy, as real models can; a network learns that from thousands of texts. It has repeated
lists of made-up names, numbers and words, and has called random tools whose parameters the question names. It
has seen neither the four tools nor questions like these, and calls none of the four correctly before it is
taught. The names in the 100 questions occur in no text of the base and in none of the 200 conversations, and
the numbers in none of the conversations.

On two idle cores the base takes 4 minutes. `ZAYA_TAUGHT_TOOLS=FOLDER` keeps the runs; with the same folder,
complete runs are not repeated.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import openai
import pytest
from serving_process import started
from tool_conversations import TOOLS, base_chats, conversations, tokenizer_text, unseen_questions

from zaya_jax.data.chats.records import parse_messages
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.tokenizers.tokenizer import TOOL_TAGS, load_tokenizer
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer

LENGTH = 352
"""Tokens of a window: one conversation, or several lists."""
NUM_SLOTS = 8
CONFIG = pathlib.Path(__file__).parents[2] / "configs/tiny.py"
SMALL = {
    "model.vocab_size": 752, "model.moe_intermediate_size": 128, "model.num_experts": 2,
    "model.router_hidden_size": 16, "model.layer_pattern": "('hybrid',)", "model.sliding_window": None,
    "execution.remat": "none",
}  # fmt: skip
"""A network of 0.4 million parameters: two layers of width 128."""
TAUGHT = {
    "base": {},
    "full weights": {"optimizer.learning_rate": 3e-3},
    "LoRA": {
        "optimizer.learning_rate": 2e-2, "lora.rank": 32, "lora.alpha": 64,
        "lora.targets": "('layers/*',)",
    },
}  # fmt: skip
"""Options of the run by name; "base" is not taught."""
STEPS = {"base": 450, "full weights": 80, "LoRA": 120}


def build_tokenizer(folder):
    """Trains a tokenizer on the words of the template and the tools, without any question."""
    texts, words = folder / "texts", load_chat_format("zaya", load_tokenizer("byte-tools"))
    texts.mkdir()
    for number in range(12):
        (record,) = conversations(1, seed=number)
        record["messages"][0]["content"] = ""
        messages = parse_messages(record["messages"], "record", "messages")
        text = words.render(ChatInput(messages, tools=record["tools"])).text
        # Without names and numbers, whose tokens are syllables and digits.
        text = re.sub(r"<\|\w+\|>", "", re.sub(r"\n[A-Z][a-z]+\n|\d+", "\n", text))
        (texts / f"{number}.txt").write_text(f"{text}\n{tokenizer_text()}")
    specials = [*CHAT_SPECIALS, *TOOL_TAGS]
    train_tokenizer(folder / "tokenizer", source=str(texts), vocab_size=752, specials=specials)


def build_corpus(folder, name, records):
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    run_cli(
        ["data", "chats", str(folder / name), "--source", str(source), "--sequence-length", str(LENGTH),
         "--tokenizer", str(folder / "tokenizer/tokenizer.json"), "--validation-percent", "2"]
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer, two corpora, and a network that can copy."""
    chosen = os.environ.get("ZAYA_TAUGHT_TOOLS")
    folder = pathlib.Path(chosen) if chosen else tmp_path_factory.mktemp("tools")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "corpus").exists():
        build_tokenizer(folder)
        build_corpus(folder, "base corpus", base_chats())
        build_corpus(folder, "corpus", conversations(200, seed=1))
    train(folder, "base", "base corpus")
    return folder


def train(folder, name, corpus):
    values = SMALL | TAUGHT[name] | {
        "run_folder": folder / name, "data.corpus": folder / corpus, "data.source": None,
        "data.tokenizer": folder / "tokenizer/tokenizer.json", "data.tokenizer_vocab_size": None,
        "data.sequence_length": LENGTH, "data.batch_size": 16, "train.num_steps": STEPS[name],
        "train.sample_tokens": 0, "train.checkpoint_every": STEPS[name], "train.eval_every": STEPS[name],
        "train.init_from": None if name == "base" else folder / "base",
    }  # fmt: skip
    settings = [f"--config.{field}={value}" for field, value in values.items()]
    run_cli(["train", f"--config={CONFIG}", *settings])


def run_cli(arguments):
    """Runs a command as a user does: tests check shapes, and compile programs that are slow."""
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=3"}
    subprocess.run([sys.executable, "-m", "zaya_jax.cli", *arguments], env=environment, check=True)


def joined(stream):
    """Name and arguments of the calls of a streamed answer, and its last finish reason."""
    calls, reason = [], None
    for chunk in stream:
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    calls.append([part.function.name, ""])
                calls[part.index][1] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return calls, reason


def is_right(client, question, expected):
    """Returns whether the answer is the expected call; whole and streamed answers must be equal."""
    fields = {
        "model": "taught", "temperature": 0, "max_tokens": 120, "tools": TOOLS,
        "messages": [{"role": "user", "content": question}],
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**fields).choices
    calls = [[each.function.name, each.function.arguments] for each in choice.message.tool_calls or []]
    assert joined(client.chat.completions.create(stream=True, **fields)) == (calls, choice.finish_reason)
    assert "<" not in (choice.message.content or "")
    # A base model calls what is no tool, with arguments that may be cut.
    if choice.finish_reason != "tool_calls":
        return False
    return [(name, json.loads(arguments)) for name, arguments in calls] == [expected]


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TAUGHT)
def test_a_model_calls_the_tools_that_it_was_taught(folder, name):
    if name != "base":
        train(folder, name, "corpus")
    questions = unseen_questions(100, seed=2, base=base_chats(), taught=conversations(200, seed=1))
    options = ("--port", "0", "--slots", str(NUM_SLOTS), "--max-length", "512", "--model-name", "taught")
    command = [sys.executable, "-m", "zaya_jax.cli", "serve", str(folder / name), *options]
    with (
        started(command, seconds=900) as server,
        openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0, timeout=900) as client,
        concurrent.futures.ThreadPoolExecutor(NUM_SLOTS) as clients,
    ):
        num_right = sum(clients.map(functools.partial(is_right, client), questions, questions.values()))
    print(f"{name}: {num_right} of 100 questions have the right tool with the right arguments")
    # Otherwise the base would not have to be taught.
    assert num_right >= 90 if name != "base" else num_right <= 5
