"""Recipes of ZAYA1-8B at the size of a test: a command from a file of records to a run, one to serve it."""

import json
import random
import sys

import openai
import pytest
from serving_process import started
from small_runs import make_base, small_values

from zaya_jax import cli
from zaya_jax.checkpoint import read_config

pytestmark = pytest.mark.campaign

SIZES = {
    "model.vocab_size": 264,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.head_dim": 16,
    "model.moe_intermediate_size": 32,
    "model.num_experts": 2,
    "model.router_hidden_size": 8,
    "data.tokenizer": "byte-chat",
    "data.sequence_length": 128,
}


def write_records(file, recipe):
    numbers = random.Random(0)
    with file.open("w") as out:
        for number in range(60):
            asked = [{"role": "user", "content": f"What is {number}?"}]
            texts = ["".join(numbers.choices("abcdefgh", k=6)) for _ in range(2)]
            answers = [[{"role": "assistant", "content": text}] for text in texts]
            record = {"messages": asked + answers[0]}
            if recipe == "dpo":
                record = {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
            out.write(json.dumps(record) + "\n")


@pytest.mark.parametrize("recipe", ["sft", "lora", "dpo"])
def test_a_recipe_leads_from_a_file_to_a_served_answer(tmp_path, recipe):
    values = small_values(run_folder=str(tmp_path / "base"), corpus="corpus")
    values["model"] = {name.partition(".")[2]: x for name, x in SIZES.items() if name.startswith("model.")}
    make_base(tmp_path / "base", values)
    write_records(tmp_path / "records.jsonl", recipe)
    fields = SIZES | {
        "data.corpus": tmp_path / "corpus",
        "data.source": tmp_path / "records.jsonl",
        "train.init_from": tmp_path / "base",
        "run_folder": tmp_path / "run",
    }
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    cli.main(["train", f"--config=configs/zaya1_8b_{recipe}.py", *arguments])
    config = read_config(str(tmp_path / "run"))
    assert 1 < config.train.num_steps < 60
    assert config.lora.base_dtype == (None if recipe == "sft" else "bfloat16")
    with started(
        [sys.executable, "-m", "zaya_jax.cli", "serve", str(tmp_path / "run"), "--port", "0"]
    ) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="run", messages=[{"role": "user", "content": "What is 1?"}], max_tokens=4, temperature=0
        )
    assert answer.usage.completion_tokens > 0
