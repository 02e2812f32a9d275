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
# # The first run
#
# Trains a small ZAYA1 on Python's own source code, continues a prompt with it, and exports it for
# `transformers`. It runs in Jupyter and in Google Colab (upload `first_run.ipynb`), on two CPU cores in about
# two minutes.
#
# The first cell installs zaya_jax from its wheel, which `pip wheel --no-deps .` builds in a checkout. Put the
# wheel next to this notebook; Colab asks for it. In an environment that has zaya_jax, nothing is installed.

# %%
import glob
import importlib.util
import os
import subprocess
import sys

# The wheel's file, or the address of one.
WHEEL = os.environ.get("ZAYA_WHEEL", "")

if importlib.util.find_spec("zaya_jax") is None:
    wheels = [WHEEL] if WHEEL else sorted(glob.glob("zaya_jax-*.whl"))
    if not wheels and "google.colab" in sys.modules:
        from google.colab import files

        wheels = list(files.upload())
    if not wheels:
        raise SystemExit("put the wheel next to this notebook, or set WHEEL to its file or address")
    # The extra "plan" has matplotlib, for the figure.
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"{wheels[-1]}[plan]"], check=True)
    importlib.invalidate_caches()

# %% [markdown]
# `zaya` is a command-line program. This function runs it and shows what it prints. The options make the run
# short: bytes as tokens, so that no tokenizer is trained, and few steps.

# %%
import json
import pathlib
import shlex


def zaya(command: str) -> None:
    words = [sys.executable, "-m", "zaya_jax.cli", *shlex.split(command)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="")
    if process.returncode:
        raise SystemExit(f"zaya {command.split()[0]} failed")


# %% [markdown]
# ## Data
#
# A corpus is a folder of tokens with a part held out. Here it is made from one package of the standard
# library.

# %%
zaya(f"data build corpora/email --source {pathlib.Path(json.__file__).parents[1] / 'email'} --pattern '*.py'")

# %% [markdown]
# ## Training
#
# The config is a Python file, `configs/tiny.py`, which the wheel contains; any field can be set on the
# command line.

# %%
zaya(
    "train --config=configs/tiny.py --config.run_folder=runs/first --config.data.corpus=corpora/email "
    "--config.data.source=None --config.data.tokenizer=byte --config.data.tokenizer_vocab_size=None "
    "--config.data.sequence_length=128 --config.data.batch_size=8 --config.train.num_steps=120 "
    "--config.optimizer.warmup_steps=10 --config.train.sample_tokens=0"
)

# %%
import matplotlib.pyplot as plt

rows = [json.loads(line) for line in pathlib.Path("runs/first/metrics.jsonl").read_text().splitlines()]
train = [row for row in rows if row["kind"] == "train"]
held_out = [row for row in rows if row["kind"] == "validation"][-1]
plt.plot([row["step"] for row in train], [row["bits_per_byte"] for row in train], label="training")
plt.axhline(held_out["bits_per_byte"], color="black", linestyle=":", label="held out, at the end")
plt.xlabel("step")
plt.ylabel("bits per byte")
plt.legend()
plt.show()

# %% [markdown]
# ## Text
#
# After 120 steps on bytes the text has the shape of Python, not its meaning. `zaya train` without options
# trains for 800 steps with a tokenizer, in about five minutes.

# %%
zaya("generate runs/first --prompt 'def ' --max-new-tokens 80 --seed 1")

# %% [markdown]
# ## Export
#
# `zaya convert` writes a folder that `transformers` loads, with a model card that states how it was trained.

# %%
zaya("convert runs/first exported --license apache-2.0")
print(pathlib.Path("exported/README.md").read_text())

# %% [markdown]
# Next: chats (`chat.py`), the network from the inside (`tour.py`), and your own data:
# `zaya data build corpora/mine --source FOLDER`.
