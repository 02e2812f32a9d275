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
# # There and back: JAX, PyTorch, JAX
#
# This notebook trains a small ZAYA1, exports it, and loads it with Hugging Face's `ZayaForCausalLM`. Both
# return the same logits and the same text. PyTorch then fine-tunes it for one step, and it is converted back.
#
# This notebook needs torch and transformers; the package itself needs neither.

# %%
import functools
import os
import pathlib
import tempfile
import warnings

# The examples are small and spend most of their time on compilation: the compiler need not optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, which transformers loads

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

import zaya_jax
from zaya_jax.data.reading.batch import make_example
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
plt.rcParams["figure.constrained_layout.use"] = True
folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Train
#
# Thirty steps on one sentence. Tokens are bytes.

# %%
config = zaya_jax.ModelConfig(
    vocab_size=264,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=32,
    num_experts=4,
    router_hidden_size=16,
    layer_pattern=("hybrid_sliding", "hybrid"),
    sliding_window=16,
    max_position_embeddings=256,
    initializer_range=0.1,
)
run = zaya_jax.Config(
    model=config,
    data=zaya_jax.DataConfig(sequence_length=48, batch_size=1),
    optimizer=zaya_jax.OptimizerConfig(learning_rate=2e-2, warmup_steps=1),
    train=zaya_jax.TrainConfig(num_steps=30),
    execution=zaya_jax.ExecutionConfig(dtype="float32"),
)
tokenizer = load_tokenizer("byte")
text = "what was learned here is known there as well. "
tokens_BT = np.array([tokenizer.delimiters.begin(tokenizer.encode(text))])
batch = make_example(tokens_BT, delimiters=tokenizer.delimiters)
setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
# The sharding of a step's output state: an input with another sharding would trigger a second compilation.
placed = shardings(abstract_state(run, setup, mesh), mesh)
state, losses = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)(), []
step = compiled_step(state, setup=setup, mesh=mesh)  # of `zaya_jax.train_step`
for _ in range(run.train.num_steps):
    state, metrics = step(state, batch)
    losses.append(float(metrics.loss))
model, variables = setup.model, state.variables

figure, axis = plt.subplots(figsize=(6, 2.5))
axis.plot(losses)
axis.set(xlabel="step", ylabel="loss, nats per token", title="one memorized sentence")
plt.show()

# %% [markdown]
# ## Export
#
# `save_pytorch` writes files that `transformers` can load: weights, config, tokenizer, and a model card. The
# folder appears only once it is complete. On the command line this is `zaya convert RUN FOLDER`.

# %%
zaya_jax.save_pytorch(folder / "exported", model, variables, dtype="float32", tokenizer="byte")
for file in sorted((folder / "exported").iterdir()):
    print(f"{file.stat().st_size:>8,}  {file.name}")

# %%
reference, report = transformers.ZayaForCausalLM.from_pretrained(
    folder / "exported", output_loading_info=True
)
print({what: len(names) for what, names in report.items()})
assert not any(report.values())

# %% [markdown]
# ## Compare
#
# The logits agree up to the summation order in float32, and the text is identical.

# %%
forward = jax.jit(model.apply)
ours_BTV = np.asarray(forward(variables, jnp.asarray(tokens_BT)).logits_BTV)
with torch.no_grad():
    theirs_BTV = reference(torch.from_numpy(tokens_BT), use_cache=False).logits.numpy()
error = np.abs(ours_BTV - theirs_BTV).max() / np.abs(theirs_BTV).max()
print(f"largest difference of logits, relative to the largest logit: {error:.1e}")
assert error < 1e-4

# %%
prompt = tokenizer.delimiters.begin(tokenizer.encode("what was"))
ours = zaya_jax.generate(model, variables, prompt, max_new_tokens=24, temperature=0.0)
their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
answer = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
theirs = their_tokenizer.decode(answer[0, len(prompt) :])
print(f"JAX:     what was{tokenizer.decode(ours)}")
print(f"PyTorch: what was{theirs}")
assert tokenizer.decode(ours) == theirs

# %% [markdown]
# ## One step in PyTorch, and back
#
# Plain gradient descent on another sentence. `load_pytorch` reads what `transformers` saves.

# %%
other = torch.tensor([tokenizer.delimiters.begin(tokenizer.encode("what was learned there is known here. "))])
optimizer = torch.optim.SGD(reference.parameters(), lr=1e-2)
loss_before = reference(other, labels=other, use_cache=False).loss
loss_before.backward()
optimizer.step()
with torch.no_grad():
    answer = reference(other, labels=other, use_cache=False)
print(f"loss on the other sentence: {loss_before.item():.4f} before the step, {answer.loss.item():.4f} after")
reference.save_pretrained(folder / "tuned")

# %%
tuned_model, tuned = zaya_jax.load_pytorch(folder / "tuned")
back_BTV = np.asarray(jax.jit(tuned_model.apply)(tuned, jnp.asarray(other.numpy())).logits_BTV)
theirs_BTV = answer.logits.numpy()
error = np.abs(back_BTV - theirs_BTV).max() / np.abs(theirs_BTV).max()
moved = [float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (variables, tuned)), strict=True)]
print(f"largest difference of logits: {error:.1e}; {sum(m > 0 for m in moved)} of {len(moved)} weights moved")
assert error < 1e-4
assert any(moved)
