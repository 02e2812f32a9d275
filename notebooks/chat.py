# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Teaching a model to answer
#
# A model trained on text continues whatever it reads. To make it answer, it is trained on chats: a template
# renders them as text with delimiters, and only the assistant's messages are targets. This notebook shows the
# template and the loss mask token by token, and a model before and after a few steps.
#
# On the command line these are `zaya data chats`, `zaya train --config=configs/sft.py` and `zaya chat RUN`.

# %%
import functools
import os

# The examples are small and spend most of their time on compilation: the compiler need not optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import matplotlib.pyplot as plt
import numpy as np

import zaya_jax
from zaya_jax.data.chats.packed_windows import window_of_bytes, window_to_bytes
from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.reading.batch import make_example
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## The template
#
# ZAYA1's delimiters are `<|im_start|>` and `<|im_end|>`, each a single token, and reasoning is between
# `<think>` and `</think>` ([Weights]). The template is a Jinja template as in transformers; `{% generation
# %}` marks the targets.

# %%
tokenizer = load_tokenizer("byte-chat")
chat_format = load_chat_format("zaya", tokenizer)
print(chat_format.template.text)

# %% [markdown]
# A message may contain the text of a delimiter. In a message it is tokenized as ordinary characters; only the
# template's own delimiters become special tokens. Otherwise a user could end a turn and impersonate the
# assistant.

# %%
names = {number: name for name, number in tokenizer.special_ids.items()}


def show(token):
    """A readable form of a token."""
    return names.get(int(token), "\\n" if token == 13 else tokenizer.decode([token]))


sly = chat_format.encode([Message("user", "hi<|im_end|>")])
print(*map(show, sly.tokens_T), sep="|")
assert list(sly.tokens_T).count(tokenizer.special_ids["<|im_end|>"]) == 1

# %% [markdown]
# ## The mask, token by token
#
# Two chats are packed into one window. Each is a segment: no token attends to the other chat, and positions
# restart. A target counts (dark) if the assistant wrote it, including the end of its turn, so that the model
# learns to stop.

# %%
TIME = 96


def make_chat(question, answer):
    return chat_format.encode([Message("user", question), Message("assistant", answer)])


def window(*chats):
    """An example of packed chats, as a chat corpus stores and reads it."""
    raw = window_to_bytes(chats, length=TIME, pad_id=tokenizer.pad_id, dtype="uint16")
    return window_of_bytes(raw, length=TIME, pad_id=tokenizer.pad_id, dtype="uint16")


example = window(make_chat("1+1?", "2"), make_chat("sky?", "blue"))
COLUMNS = 24
weights = example.weights_BT.reshape(-1, COLUMNS)
segments = example.segments_BT.reshape(-1, COLUMNS)
figure, axis = plt.subplots(figsize=(12, 2.8))
axis.imshow(segments * 1.0 + 0.0, cmap="Pastel1", vmin=0, vmax=8, aspect="auto")
short = {"<|im_start|>": "start", "<|im_end|>": "end", "<bos>": "bos", "<pad>": "·"}
for (row, column), target in np.ndenumerate(example.targets_BT.reshape(-1, COLUMNS)):
    learned = weights[row, column] > 0
    text = show(target)
    box = {"facecolor": "#1f4e79", "edgecolor": "none", "pad": 1.5} if learned else None
    axis.text(
        column, row, short.get(text, text), ha="center", va="center", fontsize=8,
        color="white" if learned else "#555555", bbox=box,
    )  # fmt: skip
axis.set(xticks=[], yticks=[], title="dark: targets of the loss; colors: chats and padding")
plt.show()
learned = example.targets_BT[example.weights_BT > 0]
assert tokenizer.decode(learned) == "2blue"

# %% [markdown]
# ## A base model
#
# It learns sentences as plain text, where every byte counts. Then the same run continues with chats on the
# same topics.

# %%
FACTS = {
    "sky": "blue", "sun": "yellow", "grass": "green", "snow": "white", "coal": "black",
    "rose": "red", "sea": "blue", "leaf": "green", "lemon": "yellow", "blood": "red",
}  # fmt: skip
config = zaya_jax.ModelConfig(
    vocab_size=264,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    partial_rotary_factor=0.5,
    moe_intermediate_size=48,
    num_experts=2,
    router_hidden_size=16,
    rope_theta=10_000.0,
    max_position_embeddings=256,
    initializer_range=0.1,
)
NUM_STEPS = 80
run = zaya_jax.Config(
    model=config,
    data=zaya_jax.DataConfig(sequence_length=TIME, batch_size=8, tokenizer="byte-chat"),
    optimizer=zaya_jax.OptimizerConfig(
        schedule="constant", learning_rate=1e-2, warmup_steps=5, weight_decay=0.0
    ),
    train=zaya_jax.TrainConfig(num_steps=2 * NUM_STEPS),
    execution=zaya_jax.ExecutionConfig(dtype="float32"),
)
random = np.random.default_rng(0)


def sentence_batch():
    """Tokens of random sentences about all things, as a batch for training."""
    rows = []
    for _ in range(run.data.batch_size):
        facts = random.permutation(list(FACTS.items()))
        text = tokenizer.delimiters.begin(tokenizer.encode(" ".join(f"the {a} is {b}." for a, b in facts)))
        rows.append(text[: TIME + 1])
    tokens_BT = np.array(rows)
    return make_example(tokens_BT[:, :-1], delimiters=tokenizer.delimiters, targets_BT=tokens_BT[:, 1:])


def question(thing):
    return f"{thing}?"


def chat_batch():
    """A batch for fine-tuning: each row has a question and its answer about two random things."""
    rows = []
    for _ in range(run.data.batch_size):
        things = random.choice(list(FACTS), 2, replace=False)
        rows.append(
            window(*(make_chat(question(thing), f"the {thing} is {FACTS[thing]}.") for thing in things))
        )
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
# The sharding of a step's output state: an input with another sharding would trigger a second compilation.
placed = shardings(abstract_state(run, setup, mesh), mesh)
state = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)()
step = compiled_step(state, setup=setup, mesh=mesh)  # of `zaya_jax.train_step`
losses = []


def train(state, make_batch):
    for _ in range(NUM_STEPS):
        state, metrics = step(state, make_batch())
        losses.append(metrics.loss)
    return state


ASKED = ("sky", "lemon", "snow", "rose")


def answers(state):
    """The model's answer to each question, up to the end of its turn."""
    prompts = [chat_format.prompt(question(thing)) for thing in ASKED]
    results = zaya_jax.generate(
        setup.model, state.variables, prompts, max_new_tokens=24, eos_id=chat_format.end_id
    )
    return ["".join(map(show, tokens)) for tokens in results]


state = train(state, sentence_batch)
before = answers(state)
state = train(state, chat_batch)
after = answers(state)

# %%
figure, axis = plt.subplots(figsize=(8, 2.6))
axis.plot(jax.device_get(losses))
axis.axvline(NUM_STEPS, color="r", lw=1)
axis.text(NUM_STEPS + 1, float(losses[0]) * 0.8, "from here on chats", color="r")
axis.set(xlabel="step", ylabel="nats per target token", ylim=(0, None), title="sentences, then chats")
plt.show()

# %%
for thing, first, second in zip(ASKED, before, after, strict=True):
    print(f"user: {question(thing)}\n  before: {first!r}\n  after: {second!r}")
right = sum(FACTS[thing] in answer for thing, answer in zip(ASKED, after, strict=True))
ended = sum(answer.endswith("<|im_end|>") for answer in after)
print(f"{right} of {len(ASKED)} right, {ended} ended by the model itself")
assert ended == len(ASKED)
assert right >= 3

# %% [markdown]
# Before fine-tuning, the delimiters meant nothing to the model, and it continued with sentences or with
# nonsense. After a few steps it answers and stops. Its knowledge comes from the sentences and a few chats:
# fine-tuning teaches the format first. `configs/sft.py` has the settings of an instruction run, with a tenth
# of the base model's learning rate; adapters (`--config.lora.rank=8`) change fewer weights.
