"""A small network is taught four tools on 200 conversations, and calls them for questions it has not seen.

It knows four other tools before: copying words into a call needs more than 200 conversations to learn.
"""

import json
import os
import pathlib
import re
import sys

import openai
import pytest
from serving_process import started
from tool_conversations import (
    OTHER_TOOLS,
    TOOLS,
    conversations,
    draw_other_question,
    unseen_questions,
)

from zaya_jax import cli
from zaya_jax.data.chats.records import parse_messages
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.chats.templates.template import ChatInput
from zaya_jax.data.tokenizers.tokenizer import TOOL_TAGS, load_tokenizer
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer

LENGTH = 336
"""Tokens of a window: one conversation."""
CONFIG = pathlib.Path(__file__).parents[2] / "configs/tiny.py"
SMALL = {
    "model.hidden_size": 96, "model.num_attention_heads": 2, "model.num_key_value_heads": 1,
    "model.moe_intermediate_size": 96, "model.num_experts": 2, "model.router_hidden_size": 16,
    "model.layer_pattern": "('hybrid',)", "model.sliding_window": None, "execution.remat": "none",
}  # fmt: skip
"""A network that learns the conversations in minutes on two cores."""


def build_corpus(folder, name, records):
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    cli.main(
        ["data", "chats", str(folder / name), "--source", str(source), "--sequence-length", str(LENGTH),
         "--tokenizer", str(folder / "tokenizer/tokenizer.json"), "--validation-percent", "2"]
    )  # fmt: skip


def train(folder, run, corpus, *, steps, options=()):
    tokenizer = folder / "tokenizer/tokenizer.json"
    values = SMALL | {
        "run_folder": folder / run, "data.corpus": folder / corpus, "data.source": None,
        "data.tokenizer": tokenizer, "data.tokenizer_vocab_size": None, "data.sequence_length": LENGTH,
        "data.batch_size": 12, "model.vocab_size": 768, "train.num_steps": steps, "train.sample_tokens": 0,
        "train.checkpoint_every": steps, "train.eval_every": steps,
    }  # fmt: skip
    settings = [f"--config.{name}={value}" for name, value in values.items()]
    cli.main(["train", f"--config={CONFIG}", *settings, *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer, the conversations as a corpus, and a network that calls other tools."""
    chosen = os.environ.get("ZAYA_TAUGHT_TOOLS")
    folder = pathlib.Path(chosen) if chosen else tmp_path_factory.mktemp("tools")
    texts = folder / "texts"
    texts.mkdir(parents=True)
    # The tokenizer learns the words of the template and of the tools.
    words = load_chat_format("zaya", load_tokenizer("byte-tools"))
    records = [*conversations(400, seed=5), *other_conversations(400, seed=6)]
    for number, record in enumerate(records):
        messages = parse_messages(record["messages"], "record", "messages")
        text = words.render(ChatInput(messages, tools=record["tools"])).text
        (texts / f"{number}.txt").write_text(re.sub(r"<\|\w+\|>", "", text))
    specials = [*CHAT_SPECIALS, *TOOL_TAGS]
    train_tokenizer(folder / "tokenizer", source=str(texts), vocab_size=768, specials=specials)
    build_corpus(folder, "others", other_conversations(1500, seed=9))
    build_corpus(folder, "corpus", conversations(200, seed=1))
    train(folder, "base", "others", steps=600)
    return folder


def other_conversations(number, seed):
    return conversations(number, seed, draw_question=draw_other_question, tools=OTHER_TOOLS)


def train_full(folder):
    """Trains all weights."""
    options = [f"--config.train.init_from={folder / 'base'}", "--config.optimizer.learning_rate=3e-3"]
    train(folder, "full", "corpus", steps=200, options=options)
    return folder / "full"


def train_lora(folder):
    """Trains adapters only."""
    options = [f"--config.train.init_from={folder / 'base'}", "--config.lora.rank=16"]
    train(folder, "lora", "corpus", steps=300, options=options)
    return folder / "lora"


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


@pytest.mark.campaign
@pytest.mark.parametrize("teach", [train_full, train_lora], ids=["full weights", "LoRA"])
def test_a_model_calls_the_tools_that_it_was_taught(folder, teach):
    run = teach(folder)
    questions = unseen_questions(conversations(200, seed=1), 100, seed=2)
    options = ("--port", "0", "--slots", "4", "--max-length", str(LENGTH), "--model-name", "taught")
    command = [sys.executable, "-m", "zaya_jax.cli", "serve", str(run), *options]
    num_right = 0
    with (
        started(command, seconds=900) as server,
        openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        for question, (name, values) in questions.items():
            fields = {"model": "taught", "messages": [{"role": "user", "content": question}], "tools": TOOLS}
            (choice,) = client.chat.completions.create(temperature=0, **fields).choices
            calls = [
                [each.function.name, each.function.arguments] for each in choice.message.tool_calls or []
            ]
            streamed = joined(client.chat.completions.create(temperature=0, stream=True, **fields))
            assert streamed == (calls, choice.finish_reason)
            assert "<" not in (choice.message.content or "")
            is_right = [[each, json.loads(arguments)] for each, arguments in calls] == [[name, values]]
            num_right += is_right and choice.finish_reason == "tool_calls"
    print(f"{num_right} of 100 questions have the right tool with the right arguments")
    assert num_right >= 90
