# ruff: noqa: E501 (the table of mistakes has a line each)
"""Every wrong command line ends with exit code 2 and one message, before anything is compiled or written.

`python tests/test_command_line.py` prints the table of command lines and messages.
"""

import contextlib
import dataclasses
import errno
import importlib.metadata
import io
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import BLOCK_TOKENS, build_small_corpus, commit_folder, small_config, small_values

import zaya_jax
from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.commands.train import generate_command
from zaya_jax.config import Config, DataConfig
from zaya_jax.convert.companion_files import of_tokenizer
from zaya_jax.data.corpora.corpus import build_corpus
from zaya_jax.data.corpora.shards import Corpus, open_corpus
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.model.weights import abstract_variables

SMALL = "train --config=small.py "
PHASED = "train --config=phased.py "
LONG = "n" * 300  # no file system supports such a name


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A wrong command line.

    Attributes:
      name: name of the mistake.
      command: arguments after `zaya`.
      says: part of the expected message.
      exit_code: expected exit code; 65 for damaged files.
    """

    name: str
    command: str
    says: str
    exit_code: int = 2


MISTAKES = (
    Mistake(
        "unknown command",
        "xyz",
        'unknown command "xyz"; known are train, generate, chat, think, serve, eval, data, tokenizer, convert, ckpt, aegis, report, supervise, launch, plan, doctor, bench, completion',
    ),
    Mistake("mistyped command", "trian", 'unknown command "trian"; did you mean "train"?'),
    Mistake("mistyped option of zaya", "--versoin", 'unknown command "--versoin"; did you mean "--version"?'),
    # train: invalid config files
    Mistake("unknown option", "train --batch=8", '"--batch=8" is not an option; config fields are set by --config.section.field=value\n'),
    Mistake("mistyped option", "train --dryrun", '"--dryrun" is not an option; config fields are set by --config.section.field=value; did you mean "--dry-run"?'),
    Mistake("field as an option", "train --batch-size=8", 'config fields are set by --config.section.field=value; did you mean "--config.data.batch_size=8"?'),
    Mistake("field as an option and a word", "train --batch-size 8", 'did you mean "--config.data.batch_size=VALUE"?'),
    Mistake("field of two sections as an option", "train --learning_rate=1", 'did you mean "--config.optimizer.learning_rate=1" or "--config.balancing.learning_rate=1"?'),
    Mistake("field without its prefix", "train --data.seed=1", 'did you mean "--config.data.seed=1"?'),
    Mistake("stray word", "train runs/tiny", '"runs/tiny" is not an option'),
    Mistake("field without value", SMALL + "--config.data.seed", '"--config.data.seed" is not an option'),
    Mistake("misspelt field", SMALL + "--config.model.hiden_size=64", '"model.hiden_size"; did you mean "hidden_size"?'),
    Mistake("field of another section", SMALL + "--config.model.remat=layer", 'unknown config field "model.remat"; did you mean "execution.remat"?'),
    Mistake("field of two other sections", SMALL + "--config.model.seed=1", '"model.seed"; did you mean "data.seed" or "train.seed"?'),
    Mistake("field without its section", SMALL + "--config.remat=layer", '"remat"; did you mean "execution.remat"?'),
    Mistake("misspelt section", SMALL + "--config.modle.hidden_size=64", '"modle"; did you mean "model"?'),
    Mistake("unknown field", SMALL + "--config.train.zzz=1", '"train.zzz"; known are num_steps'),
    Mistake("field of a field", SMALL + "--config.data.seed.x=1", 'unknown config field "data.seed.x"'),
    Mistake("section as value", SMALL + "--config.model=64", "model is 64; it must be a section"),
    Mistake("missing config file", "train --config=configs/tniy.py", "no config file at configs/tniy.py; configs/ has dpo.py, sft.py, tiny.py"),
    Mistake("config file without get_config", "train --config=empty.py", "empty.py is not a config file: it must define get_config()"),
    Mistake("config of another type", "train --config=plain.py", "get_config() of plain.py returns a dict; it must return a ConfigDict"),
    # train: values
    Mistake("text for a number", SMALL + "--config.model.hidden_size=abc", "model.hidden_size is 'abc'; it must be a whole number"),
    Mistake("float for int", SMALL + "--config.model.hidden_size=32.0", "model.hidden_size is 32.0; it must be a whole number"),
    Mistake("not finite", SMALL + "--config.optimizer.learning_rate=1e999", "optimizer.learning_rate is inf; it must be a finite number"),
    Mistake("unknown choice", SMALL + "--config.optimizer.name=sgd", 'optimizer.name is \'sgd\'; it must be "muon" or "adamw"'),
    Mistake("heads not divisible", SMALL + "--config.model.num_attention_heads=3 --config.model.num_key_value_heads=2", "model.num_attention_heads is 3; it must be a multiple"),
    Mistake("odd value channels", SMALL + "--config.model.head_dim=5 --config.model.partial_rotary_factor=0.4", "it must be even"),
    Mistake("no experts", SMALL + "--config.model.num_experts=0", "model.num_experts is 0; it must be above 0"),
    Mistake("odd rotary channels", SMALL + "--config.model.head_dim=6", "model.partial_rotary_factor is 0.5; with model.head_dim 6 it must rotate an even number"),
    Mistake("no rotary channels", SMALL + "--config.model.partial_rotary_factor=0", "model.partial_rotary_factor is 0.0"),
    Mistake("sliding without window", SMALL + "--config.model.sliding_window=None", 'model.sliding_window is None; with "hybrid_sliding" layers'),
    Mistake("unknown layer kind", SMALL + "'--config.model.layer_pattern=(\"full\",)'", 'model.layer_pattern has "full"'),
    Mistake("negative learning rate", SMALL + "--config.optimizer.learning_rate=-1e-3", "optimizer.learning_rate is -0.001; it must be above 0"),
    Mistake("warm-up too long", SMALL + "--config.optimizer.warmup_steps=30", "optimizer.warmup_steps is 30; it must be below train.num_steps, 30"),
    Mistake("negative data seed", SMALL + "--config.data.seed=-1", "data.seed is -1; it must be from 0 to 2**32 - 1"),
    Mistake("data seed too large", SMALL + "--config.data.seed=4294967296", "data.seed is 4294967296; it must be from 0"),
    Mistake("replay of no steps", SMALL + "--replay-check=0", "--replay-check is 0; it must be above 0"),
    Mistake("replay of what is thrown away", SMALL + "--replay-check=5 --overwrite", "the run that --overwrite removes; give only one of them"),
    Mistake("replay of a run that begins", SMALL + "--replay-check=5", "has no checkpoint, and --replay-check repeats steps after one"),
    Mistake("no skips at all", SMALL + "--config.train.max_consecutive_skips=0", "train.max_consecutive_skips is 0; it must be above 0"),
    Mistake("negative training seed", SMALL + "--config.train.seed=-1", "train.seed is -1; it must be from 0 to 2**32 - 1"),
    Mistake("batch and microbatches", SMALL + "--config.execution.num_microbatches=3", "data.batch_size is 4; it must be a multiple of execution.num_microbatches, 3"),
    Mistake("sequence of one token", SMALL + "--config.data.sequence_length=1", "data.sequence_length is 1; it must be at least 2"),
    Mistake("sequence beyond the model", SMALL + "--config.data.sequence_length=1024", "data.sequence_length is 1024; model.max_position_embeddings allows 512"),
    # train: phases
    Mistake("phase without length", PHASED + "--config.phases.b.steps=None", "phases.b has tokens None and steps None; it must have one of them"),
    Mistake("phase with two lengths", PHASED + "--config.phases.b.tokens=1000", "phases.b has tokens 1000 and steps 8; it must have one of them"),
    Mistake("phase without steps", PHASED + "--config.phases.b.steps=0", "phases.b.steps is 0; it must be above 0"),
    Mistake("phase of an unknown name", PHASED + "--config.phases.c.steps=1", 'phases has no "c"; it has a, b'),
    Mistake("phases of one name", PHASED + "--config.phases.b.name=a", 'phases has "a" twice'),
    Mistake("phase with a bad name", PHASED + "--config.phases.b.name=1.b", 'phases has the name "1.b"; a name must be letters'),
    Mistake("phase without a name", PHASED + "'--config.phases=({\"steps\": 3},)'", "phases has no name; it must have one"),
    Mistake("phase of other shapes", PHASED + "--config.phases.b.model.hidden_size=64", "phases.b sets model.hidden_size; of model a phase can set rope_theta"),
    Mistake("phase's field of another section", PHASED + "--config.phases.b.model.remat=layer", 'phases.b sets model.remat; of model a phase can set rope_theta, sliding_rope_theta; did you mean "phases.b.execution.remat"?'),
    Mistake("phases and another length", PHASED + "--config.train.num_steps=30", "train.num_steps is 30, and the phases have 20 steps in all"),
    Mistake("phases and a section as value", PHASED + "--config.train=3", "train is 3; it must be a section"),
    Mistake("phase beyond the model", PHASED + "--config.phases.b.data.sequence_length=1024", "in phase b: data.sequence_length is 1024; model.max_position_embeddings allows 512"),
    Mistake("phase shorter than its warm-up", PHASED + "--config.phases.b.optimizer.warmup_steps=8", "in phase b: optimizer.warmup_steps is 8; it must be below train.num_steps, 8"),
    Mistake("phase and devices", PHASED + "--dry-run --devices=4", "in phase a: data.batch_ramp has steps of 2 sequences, 128 tokens; the sequences must be a multiple of 4"),
    Mistake("phase with an unknown value", PHASED + "--config.phases.b.optimizer.schedule=step", "phases.b.optimizer.schedule is 'step'; it must be \"constant\" or \"linear\""),
    Mistake("unknown schedule", SMALL + "--config.optimizer.schedule=step", "optimizer.schedule is 'step'; it must be \"constant\" or \"linear\" or \"cosine\""),
    Mistake("decay without its schedule", SMALL + "--config.optimizer.decay_steps=5", 'optimizer.decay_steps is 5 and optimizer.schedule "cosine"'),
    Mistake("schedule without its decay", SMALL + "--config.optimizer.schedule=warmup_stable_decay", 'optimizer.decay_steps is 0 and optimizer.schedule "warmup_stable_decay"'),
    Mistake("decay too long", SMALL + "--config.optimizer.schedule=warmup_stable_decay --config.optimizer.decay_steps=27", "optimizer.warmup_steps + decay_steps is 4 + 27; together they must be at most train.num_steps, 30"),
    Mistake("ramp that shrinks", SMALL + "'--config.data.batch_ramp=((2, 128), (2, 64))'", "data.batch_ramp has steps of 64 tokens after 128; it must grow"),
    Mistake("ramp beyond the batch", SMALL + "'--config.data.batch_ramp=((2, 256),)'", "data.batch_ramp has steps of 256 tokens after 0; it must grow, and stay below data.batch_size x data.sequence_length, 256"),
    Mistake("ramp of broken sequences", SMALL + "'--config.data.batch_ramp=((2, 100),)'", "data.batch_ramp has steps of 100 tokens; they must be whole sequences, a multiple of data.sequence_length, 64"),
    Mistake("ramp without steps", SMALL + "'--config.data.batch_ramp=((0, 64),)'", "data.batch_ramp has 0 steps of 64 tokens"),
    Mistake("ramp without end", SMALL + "'--config.data.batch_ramp=((30, 64),)'", "data.batch_ramp has 30 steps; it must end before train.num_steps, 30"),
    Mistake("ramp longer than its phase", PHASED + "--config.phases.a.steps=None --config.phases.a.tokens=1000", "in phase a: data.batch_ramp reads 1152 tokens; it must read fewer than the phase, 1000"),
    Mistake("ramp that is no list of pairs", SMALL + "--config.data.batch_ramp=64", "data.batch_ramp is 64; it must be a list with"),
    # train: mixtures
    Mistake("unknown mixture", PHASED + "--config.phases.b.data.mixture=web", 'in phase b: data.mixture is "web"; it must be a name in data.mixtures, which has m'),
    Mistake("mixture without weights", PHASED + "--config.data.mixtures.m.weights=(1.0,)", "data.mixtures.m has 2 corpora and 1 weights"),
    Mistake("mixture with a weight of zero", PHASED + "'--config.data.mixtures.m.weights=(1.0, 0)'", "data.mixtures.m has weight 0.0 for short; it must be above 0"),
    Mistake("mixture with one corpus twice", PHASED + "'--config.data.mixtures.m.corpora=(\"corpus\", \"corpus\")'", "data.mixtures.m lists a corpus twice"),
    Mistake("mixture of a missing corpus", PHASED + "'--config.data.mixtures.m.corpora=(\"corpus\", \"nowhere\")'", "in phase b: there is no corpus at nowhere; zaya data build nowhere --source TEXTS creates one\n"),
    Mistake("mixture of a misspelt corpus", PHASED + "'--config.data.mixtures.m.corpora=(\"corpus\", \"shrot\")'", "in phase b: there is no corpus at shrot (did you mean short?); zaya data build shrot --source TEXTS creates one\n"),
    Mistake("mixture of a short corpus", PHASED, "in phase b: data.sequence_length is 128, but the train split of short has"),
    # train: balancing
    Mistake("unknown balancing rule", SMALL + "--config.balancing.rule=pd", 'balancing.rule is \'pd\'; it must be "adamw" or "sign" or "pid"'),
    Mistake("skip share of all tokens", SMALL + "--config.balancing.skip_share=1", "balancing.skip_share is 1.0; it must be from 0 up to, not including, 1, or None"),
    Mistake("negative gain", SMALL + "--config.balancing.derivative=-1", "balancing.derivative is -1.0; it must be 0 or above"),
    # train: checkpoints
    Mistake("no minutes between checkpoints", SMALL + "--config.train.checkpoint_minutes=0", "train.checkpoint_minutes is 0.0; it must be above 0, or None"),
    Mistake("keeping every none", SMALL + "--config.train.keep_every=0", "train.keep_every is 0; it must be above 0, or None"),
    Mistake("keeping what is not saved", SMALL + "--config.train.keep_every=6", "train.keep_every is 6 and train.checkpoint_every 4; it must be a multiple of the latter, because only steps that are saved can be kept"),
    Mistake("no floor of the disk", SMALL + "--config.train.min_free_gib=-1", "train.min_free_gib is -1.0; it must be above 0, or None"),
    # train: trackers and profiling
    Mistake("nowhere to keep runs", SMALL + "--config.log.wandb=cloud", 'log.wandb is \'cloud\'; it must be "off" or "online" or "offline"'),
    Mistake("a run without a name", SMALL + "--config.log.name=", "log.name is empty; it must name the run"),
    Mistake("trace of no step", SMALL + "--config.profile.first_step=0", "profile.first_step is 0; it must be above 0, or None"),
    Mistake("trace by nobody", SMALL + "'--config.profile.processes=()'", "profile.processes is (); it must list process ids, from 0"),
    Mistake("dump of some", SMALL + "--xla-dump=some", "argument --xla-dump: invalid choice: 'some'"),
    # train: devices
    Mistake("batch and devices", SMALL + "--dry-run --devices=3", "data.batch_size is 4; it must be a multiple of 3: 3 devices times 1 microbatches"),
    Mistake("no devices", SMALL + "--dry-run --devices=0", "--devices is 0; it must be at least 1"),
    Mistake("devices without dry run", SMALL + "--devices=2", "--devices goes with --dry-run"),
    Mistake("devices in words", SMALL + "--dry-run --devices=two", "argument --devices: invalid int value: 'two'"),
    # train: data
    Mistake("sequence and blocks", SMALL + "--config.data.sequence_length=96", "data.sequence_length is 96, but corpus has blocks of 256 tokens; one must be a multiple"),
    Mistake("missing corpus", SMALL + "--config.data.corpus=nowhere", "there is no corpus at nowhere; zaya data build nowhere --source TEXTS creates one, or let the run build it with --config.data.source=TEXTS"),
    Mistake("misspelt corpus", "train --config.run_folder=new --config.data.corpus=corups", "there is no corpus at corups (did you mean corpus?); zaya data build corups --source TEXTS creates one, or let the run build it"),
    Mistake("misspelt corpus of a run", "train --config=runs/fresh/config.json --config.run_folder=new --config.data.corpus=corups", "there is no corpus at corups (did you mean corpus?)"),
    Mistake("missing source", SMALL + "--config.data.corpus=nowhere --config.data.source=nothing", "nothing does not exist; it must be a folder or a file with text"),
    Mistake("no corpus in the folder", SMALL + "--config.data.corpus=texts", "there is no corpus at texts: it has no manifest.json"),
    Mistake("empty source", SMALL + "--config.data.corpus=nowhere --config.data.source=hollow", 'no file in hollow has a name that matches "*"'),
    Mistake("empty texts", SMALL + "--config.data.corpus=nowhere --config.data.source=blank", 'all files like "*" in blank are without text (1 empty, 1 not UTF-8)'),
    Mistake("text too short", SMALL + "--config.data.corpus=short", "the train split of short has"),
    Mistake("damaged corpus", SMALL + "--config.data.corpus=damaged", "train-00000.array_record has 10 bytes, but the manifest says", exit_code=65),
    Mistake("missing tokenizer", SMALL + "--config.data.tokenizer=none.json", 'the tokenizer "none.json" does not exist'),
    Mistake("no tokenizer", SMALL + "--config.data.tokenizer=small.py", "small.py is not a Hugging Face tokenizer.json"),
    Mistake("vocabulary too small", SMALL + "--config.model.vocab_size=128", 'model.vocab_size is 128; data.tokenizer "byte" has 259 tokens'),
    # train: the run folder
    Mistake("run of another config", SMALL + "--config.run_folder=runs/done --config.model.hidden_size=64", "runs/done holds a run of another config; model.hidden_size is 64 and was 32: it changes what is learned; choose another --config.run_folder"),
    Mistake("run folder is a file", SMALL + "--config.run_folder=small.py", "run_folder is small.py, and small.py is a file"),
    Mistake("run folder below a file", SMALL + "--config.run_folder=small.py/run", "run_folder is small.py/run, and small.py is a file"),
    Mistake("folder of others", SMALL + "--config.run_folder=texts", "texts is not empty and not a run folder"),
    Mistake("overwriting a folder of others", SMALL + "--config.run_folder=texts --overwrite", "texts is not empty and not a run folder"),
    Mistake("overwriting others' config.json", SMALL + "--config.run_folder=foreign --overwrite", "foreign/config.json is not the config of a run: unknown config field"),
    Mistake("broken config.json", SMALL + "--config.run_folder=broken", "broken/config.json is not the config of a run"),
    Mistake("folder of others before a corpus", SMALL + "--config.run_folder=texts --config.data.corpus=nowhere --config.data.source=texts", "texts is not empty and not a run folder"),
    Mistake("checkpoints in a file", SMALL + "--config.run_folder=runs/odd", "run_folder is runs/odd, and runs/odd/checkpoints is a file"),
    Mistake("damaged checkpoint", SMALL + "--config.run_folder=runs/torn", "runs/torn/checkpoints/2 is damaged: weights/_METADATA is missing; runs/torn/checkpoints/1 is damaged: training/_METADATA is missing; no checkpoint is intact: restore one from a backup", exit_code=65),
    # train: initial weights
    Mistake("run from another network", SMALL + "--config.train.init_from=runs/done --config.model.hidden_size=64", "train.init_from: params/embedding/bias of runs/done is (32,), and of this run (64,)"),
    Mistake("start from a run without checkpoint", SMALL + "--config.train.init_from=runs/fresh", "train.init_from: runs/fresh has no checkpoint yet"),
    Mistake("start from a damaged checkpoint", SMALL + "--config.train.init_from=runs/torn", "train.init_from: runs/torn/checkpoints/2 is damaged", exit_code=65),
    Mistake("overwriting for a start from nothing", "train --config=runs/done/config.json --config.train.init_from=runs/fresh --overwrite", "train.init_from: runs/fresh has no checkpoint yet"),
    Mistake("start from its own folder", "train --config=runs/done/config.json --config.train.init_from=runs/done", "train.init_from is runs/done and run_folder runs/done; they must be two folders, neither in the other: give the new run its own, --config.run_folder=ANOTHER"),
    Mistake("overwriting what it starts from", "train --config=runs/done/config.json --config.train.init_from=runs/done --overwrite", "they must be two folders"),
    Mistake("overwriting the same by another spelling", "train --config=runs/done/config.json --config.train.init_from=runs/../runs/done/ --overwrite", "they must be two folders"),
    Mistake("overwriting the same through a link", "train --config=runs/done/config.json --config.train.init_from=links/done --overwrite", "they must be two folders"),
    Mistake("run folder in what it starts from", SMALL + "--config.train.init_from=runs/done --config.run_folder=runs/done/tuned", "they must be two folders"),
    Mistake("start from a folder within", SMALL + "--config.train.init_from=runs/home/corpus --config.run_folder=runs/home --overwrite", "they must be two folders"),
    # train: what --overwrite would delete
    Mistake("overwriting its corpus", SMALL + "--config.run_folder=runs/home --config.data.corpus=runs/home/corpus --overwrite", "data.corpus has runs/home/corpus, which is in the run folder runs/home; --overwrite would remove it, so choose another"),
    Mistake("overwriting its corpus through a link", SMALL + "--config.run_folder=runs/home --config.data.corpus=links/corpus --overwrite", "data.corpus has links/corpus, which is in"),
    Mistake("overwriting a link to its corpus", SMALL + "--config.run_folder=runs/home --config.data.corpus=runs/home/outside --overwrite", "data.corpus has runs/home/outside, which is in"),
    Mistake("overwriting by a link what lies there", SMALL + "--config.run_folder=links/home --config.data.corpus=runs/home/corpus --overwrite", "which is in the run folder links/home"),
    Mistake("overwriting its tokenizer", SMALL + "--config.run_folder=runs/home --config.data.tokenizer=runs/home/tokenizer.json --overwrite", "data.tokenizer has runs/home/tokenizer.json"),
    Mistake("overwriting its source", SMALL + "--config.run_folder=runs/home --config.data.source=runs/home --overwrite", "data.source has runs/home, which is in"),
    Mistake("overwriting a corpus of a mixture", PHASED + "'--config.data.mixtures.m.corpora=(\"corpus\", \"runs/home/corpus\")' --config.run_folder=runs/home --overwrite", "data.mixtures.m.corpora has runs/home/corpus"),
    # errors of the operating system
    Mistake("config file of a long name", f"train --config={LONG}", "File name too long"),
    Mistake("config file that is a folder", "train --config=texts", "no config file at texts"),
    Mistake("run folder of a long name", SMALL + f"--config.run_folder={LONG}", "File name too long"),
    Mistake("run folder nobody can make", SMALL + "--config.run_folder=/proc/none/run", "train: /proc/none: No such file or directory"),
    Mistake("generate from a long name", f"generate {LONG}", f"generate: {LONG}/config.json: File name too long"),
    Mistake("corpus below a file", "data build small.py/new --source texts", "Not a directory"),
    Mistake("corpus of a long name", f"data build {LONG} --source texts", "File name too long"),
    Mistake("corpus nobody can make", "data build /proc/none/new --source texts", "data: /proc/none: No such file or directory"),
    Mistake("convert from a long name", f"convert {LONG} out", f"convert: {LONG}: File name too long\n"),
    Mistake("convert to where nobody can write", "convert runs/done /proc/none/out", "/proc/none: No such file or directory; run the same command again to resume"),
    Mistake("inspect a long name", f"convert inspect {LONG}", "File name too long"),
    # plan
    Mistake("unknown device", "plan --config=small.py --device=mi400x", 'unknown device "mi400x"; known are mi300x'),
    Mistake("no compiler for it", "plan --config=small.py --gpus-per-node=1 --device=h100 --compile", "compiling for h100 is not supported; choose one of mi300x, mi325x"),
    Mistake("no kernels for it", "plan kernels --device=mi355x", "compiling for mi355x is not supported; choose one of mi300x, mi325x"),
    Mistake("no nodes", "plan --config=small.py --nodes=0", "--nodes is 0; it must be at least 1"),
    Mistake("no GPUs", "plan --config=small.py --gpus-per-node=0", "--gpus-per-node is 0; it must be at least 1"),
    Mistake("batch and GPUs", "plan --config=small.py --gpus-per-node=3", "data.batch_size is 4; it must be a multiple of 3: 3 devices"),
    Mistake("no sequence at a time", "plan --config=small.py --micro-batch=0", "--micro-batch is 0; it must be at least 1"),
    Mistake("batch and micro-batch", "plan --config=small.py --gpus-per-node=2 --micro-batch=3", "data.batch_size is 4; it must be a multiple of 6: --micro-batch=3 on 2 GPUs"),
    Mistake("a phase that is not", "plan --config=small.py --phase=first", '--phase is "first"; the phases of the run are: none'),
    Mistake("mistyped option of plan", "plan --nodse=3", '"--nodse=3" is not an option; config fields are set by --config.section.field=value; did you mean "--nodes"?'),
    Mistake("mistyped option of kernels", "plan kernels --devce=mi300x", 'did you mean "--device"?'),
    Mistake("mistyped part of plan", "plan kernel", 'did you mean "kernels"?'),
    Mistake("nothing to plan", "plan runs/done", "argument what: invalid choice: 'runs/done'"),
    Mistake("field of rocm-wheels", "plan rocm-wheels --config.data.seed=1", '"--config.data.seed=1" is not an option of rocm-wheels'),
    Mistake("no time to compile", "plan --config=small.py --gpus-per-node=1 --compile --time-limit=0", "--time-limit is 0.0; it must be above 0"),
    Mistake("compiling without the plugin", "plan --config=small.py --gpus-per-node=1 --compile", "compiling needs JAX's ROCm plugin"),
    Mistake("a picture nobody can draw", "plan --config=small.py --gpus-per-node=1 --picture=plan.txt", "--picture is plan.txt; its name must end in one of ."),
    Mistake("JSON below a file", "plan --config=small.py --gpus-per-node=1 --json=small.py/plan.json", "--json is small.py/plan.json, and there is no folder small.py"),
    Mistake("JSON onto a folder", "plan --config=small.py --gpus-per-node=1 --json=texts", "--json is texts, which is a folder; it must be a file"),
    # chats
    Mistake("chats without a length", "data chats out --source texts", "the following arguments are required: --sequence-length"),
    Mistake("no chats", "data chats out --source texts --sequence-length 64", "no chats found at texts; it must be a file of JSON Lines, or a folder of *.jsonl"),
    # generate
    Mistake("generate without run", "generate", "the following arguments are required: RUN"),
    Mistake("generate from no run", "generate texts", "texts is not a run folder: it has no config.json"),
    Mistake("generate without checkpoint", "generate runs/fresh", "runs/fresh has no checkpoint yet"),
    Mistake("generate from a damaged checkpoint", "generate runs/torn", "runs/torn/checkpoints/2 is damaged: weights/_METADATA is missing", exit_code=65),
    Mistake("negative temperature", "generate runs/done --temperature -1", "temperature is -1.0; it must be 0"),
    Mistake("temperature not a number", "generate runs/done --temperature nan", "temperature is nan; it must be 0"),
    Mistake("empty nucleus", "generate runs/done --top-p 0", "top_p is 0.0; it must be above 0 and at most 1"),
    Mistake("negative top-k", "generate runs/done --top-k -1", "top_k is -1; it must be a number of tokens"),
    Mistake("no new tokens", "generate runs/done --max-new-tokens 0", "max_new_tokens is 0; it must be at least 1"),
    Mistake("prompt too long", f"generate runs/done --max-new-tokens 412 --prompt {'a' * 100}", "prompt 0 has 101 tokens and max_new_tokens is 412; together"),
    Mistake("a cache on devices that are not there", "generate runs/done --context-devices 999", "context_devices is 999; it must be from 1 to"),
    Mistake("chat without a prompt", "generate runs/done --chat", "--chat needs --prompt, the user's turn to answer"),
    Mistake("template without chat", "generate runs/done --template zaya", "--template needs --chat; without it"),
    Mistake("chat with a tokenizer without borders", "generate runs/done --chat --prompt a --template zaya", 'the tokenizer "byte" has no special token <|im_end|> and <|im_start|>, which the chat template "zaya" writes; "byte-chat" has them'),
    Mistake("input without output", "generate runs/done --input records.jsonl", "--input and --output need each other: the prompts, and the file for their answers"),
    Mistake("output without input", "generate runs/done --output out.jsonl", "--input and --output need each other"),
    Mistake("prompt and a file of prompts", "generate runs/done --prompt a --input records.jsonl --output out.jsonl", "--prompt is one prompt and --input a file of prompts; use one of the two"),
    Mistake("batches of nothing", "generate runs/done --input records.jsonl --output out.jsonl --batch-size 0", "--batch-size is 0; it must be at least 1"),
    Mistake("logprobs of what is printed", "generate runs/done --logprobs", "--logprobs needs --input and --output"),
    Mistake("no file of prompts", "generate runs/done --input none.jsonl --output out.jsonl", "none.jsonl: No such file or directory"),
    Mistake("texts and no prompts", "generate runs/done --input records.jsonl --output out.jsonl", 'records.jsonl:1 must have either "prompt" or "messages"; it has text'),
    Mistake("negative temperature for a file", "generate runs/done --input records.jsonl --output out.jsonl --temperature -1", "temperature is -1.0; it must be 0"),
    # chat
    Mistake("chat with a run that knows no chats", "chat runs/done", "runs/done has no chat template: it was trained on texts, not on chats; zaya generate continues a text"),
    Mistake("answer with a run that knows no chats", "generate runs/done --chat --prompt hi", "runs/done has no chat template: it was trained on texts, not on chats; zaya generate continues a text"),
    Mistake("answer a file with a run that knows no chats", "generate runs/done --chat --input prompts.jsonl --output out.jsonl", "runs/done has no chat template: it was trained on texts, not on chats"),
    Mistake("think in chats with a run that knows none", "think runs/done --chat --prompt hi --thinking 4 --tail 2", "runs/done has no chat template: it was trained on texts, not on chats"),
    Mistake("chat with no run", "chat texts", "texts is not a run folder: it has no config.json"),
    Mistake("chat by a template that is not there", "chat runs/done --template none.jinja", 'unknown chat template "none.jinja"; it must be "zaya" or the path of a Jinja file'),
    Mistake("chat without room", "chat runs/done --template zaya --max-new-tokens 0", "--max-new-tokens is 0; it must be at least 1"),
    Mistake("chat with a seed out of range", "chat runs/done --template zaya --seed -1", "--seed is -1; it must be from 0 to 2**32 - 1"),
    Mistake("empty stop string", "generate runs/done --stop ''", 'a stop string is ""; it must have at least one character'),
    Mistake("sampling seed out of range", "generate runs/done --seed -1", "--seed is -1; it must be from 0 to 2**32 - 1"),
    Mistake("unknown option of generate", "generate runs/done --zzz 1", "unrecognized arguments: --zzz 1; zaya generate --help shows the options"),
    Mistake("mistyped option of generate", "generate runs/done --topp 1", 'unrecognized arguments: --topp 1; did you mean "--top-p"?'),
    Mistake("mistyped option with its value", "generate runs/done --temprature=1", 'unrecognized arguments: --temprature=1; did you mean "--temperature"?'),
    # serve
    Mistake("serve no run", "serve", "the following arguments are required: RUN"),
    Mistake("serve to all without a key", "serve runs/done --host 0.0.0.0", "--host is 0.0.0.0, which other machines can reach; set --api-key-file or ZAYA_API_KEY"),
    Mistake("serve with an empty key", "serve runs/done --api-key-file blank/empty.txt", "blank/empty.txt has no valid key; it must be one word of ASCII letters"),
    Mistake("serve with a key that is not there", "serve runs/done --api-key-file nowhere", "nowhere: No such file or directory"),
    Mistake("serve without slots", "serve runs/done --slots 0", "--slots is 0; it must be at least 1"),
    Mistake("serve with no line", "serve runs/done --max-waiting 0", "--max-waiting is 0; it must be at least 1"),
    Mistake("serve to nobody", "serve runs/done --max-client-connections 0", "--max-client-connections is 0; it must be at least 1"),
    Mistake("serve without reading", "serve runs/done --read-seconds 0", "--read-seconds is 0; it must be above 0"),
    Mistake("serve for no time", "serve runs/done --request-seconds 0", "--request-seconds is 0; it must be above 0"),
    Mistake("serve with less than no memory", "serve runs/done --prefix-mib -1", "--prefix-mib is -1; it must be at least 0"),
    Mistake("serve to an origin without scheme", "serve runs/done --allow-origin localhost", "--allow-origin is localhost; it must be a URL such as http://localhost:3000, or *"),
    Mistake("serve at a port that is none", "serve runs/done --port 65536", "--port is 65536; it must be 0 to 65535"),
    Mistake("serve at another machine", "serve runs/done --port 0 --host 192.0.2.1 --api-key-file letter", "cannot listen on 192.0.2.1:0"),
    Mistake("serve what is no run", "serve texts --port 0", "texts is not a run folder: it has no config.json"),
    Mistake("serve without weights", "serve runs/fresh --port 0", "runs/fresh has no checkpoint yet"),
    Mistake("serve by a template that is not there", "serve runs/done --port 0 --template none.jinja", 'unknown chat template "none.jinja"'),
    Mistake("serve longer texts than the model", "serve runs/done --port 0 --max-length 513", "max_length is 513; it must be from 1 to model.max_position_embeddings, 512"),
    Mistake("mistyped option of serve", "serve runs/done --slot 2", 'did you mean "--slots"?'),
    # eval
    Mistake("think in no round", "think runs/done --prompt q --rounds 0 --first-round counted", "rounds is 0; with first_round 'counted' it must be 1 (no aggregation) or above"),
    Mistake("think of nothing", "think runs/done", "--prompt is empty; it must be the question"),
    Mistake("think with no run", "think nowhere --prompt q", "nowhere is not a run folder: it has no config.json"),
    Mistake("think beyond the context", "think runs/done --prompt q --thinking=500 --tail=100", "they must not exceed model.max_position_embeddings, 512: reduce thinking, tail or candidates"),
    Mistake("more candidates than there are", "think runs/done --prompt q --population=2", "candidates is 4; it must be at most population, 2, because no tail is shown twice"),
    Mistake("tail of no token", "think runs/done --prompt q --tail=0", "tail is 0; it must be at least 1"),
    Mistake("answers by no pattern", "think runs/done --prompt q --answer-pattern=(", "the pattern '(' is not a regular expression"),
    Mistake("aggregation without a question", "think runs/done --prompt q --aggregation=letter", "letter has {question} 0 times; an aggregation prompt must have {question} and {candidates} exactly once each"),
    Mistake("thoughts to nowhere", "think runs/done --prompt q --json=nowhere/out.json", "--json is nowhere/out.json, and there is no folder nowhere"),
    Mistake("many questions at once", "think runs/done --prompt q --input=prompts.jsonl", "unrecognized arguments: --input=prompts.jsonl; zaya think --help shows the options"),
    Mistake("evaluate no run", "eval nowhere --text letter", "nowhere is not a run folder: it has no config.json"),
    Mistake("evaluate without weights", "eval runs/fresh --text letter", "runs/fresh has no checkpoint yet"),
    Mistake("evaluate on nothing", "eval runs/done", "there is nothing to evaluate; add --text FILE... or --tasks=NAME,..."),
    Mistake("evaluate on a text that is not there", "eval runs/done --text nothing.txt", "nothing.txt: No such file or directory"),
    Mistake("evaluate on a folder", "eval runs/done --text texts", "texts: Is a directory"),
    Mistake("evaluate on an empty text", "eval runs/done --text blank/empty.txt", "blank/empty.txt is empty; a text to evaluate must have a character"),
    Mistake("evaluate on another encoding", "eval runs/done --text letter blank/latin.txt", "blank/latin.txt is not UTF-8 text: byte 0 does not begin a character"),
    Mistake("context beyond the model", "eval runs/done --text letter --context=513", "the context is 513 tokens; it must be from 1 to model.max_position_embeddings, 512"),
    Mistake("rows of none", "eval runs/done --text letter --batch-size=0", "the number of rows is 0; it must be at least 1"),
    Mistake("figures to nowhere", "eval runs/done --text letter --json=nowhere/out.json", "--json is nowhere/out.json, and there is no folder nowhere"),
    Mistake("tasks without a name", "eval runs/done --tasks=,", "--tasks names no task; it must be NAME or NAME,NAME,..."),
    Mistake("folder of no task", "eval runs/done --text letter --task-folder=texts", "--task-folder needs --tasks"),
    Mistake("tasks of no folder", "eval runs/done --tasks=a --task-folder=nowhere", "the folder of tasks, nowhere, does not exist"),
    Mistake("tasks of no example", "eval runs/done --tasks=a --limit=0", "--limit is 0; it must be at least 1"),
    Mistake("fewer shots than none", "eval runs/done --tasks=a --num-fewshot=-1", "--num-fewshot is -1; it must be at least 0"),
    Mistake("examples in a turn without turns", "eval runs/done --tasks=a --fewshot-in-one-turn", "--fewshot-in-one-turn needs --apply-chat-template"),
    Mistake("samples of no task", "eval runs/done --text letter --samples=out.jsonl", "--samples needs --tasks"),
    Mistake("no wait for others", "eval runs/done --text letter --wait=0", "--wait is 0; it must be at least 1"),
    Mistake("mistyped option of eval", "eval runs/done --txt letter", 'did you mean "--text"?'),
    # data
    Mistake("no subcommand of data", "data", "the following arguments are required: COMMAND"),
    Mistake("mistyped subcommand of data", "data bulid new", 'did you mean "build"?'),
    Mistake("corpus without folder", "data build", "the following arguments are required: OUT"),
    Mistake("corpus exists", "data build corpus --source texts", "corpus is already a corpus; --overwrite replaces it"),
    Mistake("corpus in a folder of others", "data build hf --source texts --overwrite", "hf contains files but no manifest.json"),
    Mistake("corpus from nothing", "data build new --source nothing", "nothing does not exist; it must be a folder or a file with text"),
    Mistake("corpus without matching names", "data build new --source texts --pattern *.md", 'no file in texts has a name that matches "*.md"'),
    Mistake("overwriting the source of a corpus", "data build short --source short/texts --overwrite", "is inside the corpus short; --overwrite would delete it"),
    Mistake("overwriting the source through a link", "data build short --source links/texts --overwrite", "the source short/texts is inside the corpus short"),
    Mistake("overwriting the tokenizer of a corpus", "data build short --source texts --tokenizer short/tokenizer.json --overwrite", "the tokenizer short/tokenizer.json is inside the corpus short"),
    Mistake("no held-out share", "data build new --source texts --validation-percent 0", "validation_percent is 0; it must be from 1 to 99"),
    Mistake("unknown option of corpus", "data build new --sauce texts", 'unrecognized arguments: --sauce texts; did you mean "--source"?'),
    Mistake("corpus of one character", "data build new --source letter", "the only text is a single character; both splits must have some"),
    Mistake("no workers", "data build new --source texts --workers 0", "the number of workers is 0; it must be at least 1"),
    Mistake("neither stop nor skip", "data build new --source texts --on-bad=ask", "argument --on-bad: invalid choice: 'ask'"),
    Mistake("pattern of one file", "data build new --source small.py --pattern *.py", 'small.py is a single file; remove --pattern'),
    Mistake("field of text", "data build new --source texts --field body", "are plain text, which has no fields; remove --field"),
    Mistake("records without the field", "data build new --source records.jsonl --field body", 'records.jsonl, record 1: no field "body"; it has "text"; --field names the field with the text; --on-bad skip'),
    Mistake("broken record", "data build new --source records.jsonl", "records.jsonl, record 2: not JSON; "),
    Mistake("kinds of files", "data build new --source kinds", "kinds has files of several kinds (1 of JSON lines, 1 of text); select one kind"),
    Mistake("source that is a device", "data build new --source /dev/zero", "the source /dev/zero is a device"),
    Mistake("verify what is no corpus", "data verify texts", "there is no corpus at texts: it has no manifest.json"),
    Mistake("verify what is damaged", "data verify damaged", "train-00000.array_record has 10 bytes, but the manifest says", exit_code=65),
    Mistake("inspect what is not there", "data inspect nowhere", "there is no corpus at nowhere"),
    Mistake("fewer samples than none", "data inspect corpus --samples -1", "--samples is -1; it must be 0 or above"),
    # convert (tests/convert/test_hostile.py has the files)
    Mistake("convert without target", "convert runs/done", "the following arguments are required: DST"),
    Mistake("convert from nothing", "convert nowhere out", "nowhere does not exist; give the folder of a run"),
    Mistake("convert from texts", "convert texts out", "texts has no safetensors file"),
    Mistake("convert without checkpoint", "convert runs/fresh out", "runs/fresh has no checkpoint yet"),
    Mistake("convert from a damaged checkpoint", "convert runs/torn out", "runs/torn/checkpoints/2 is damaged: weights/_METADATA is missing; runs/torn/checkpoints/1 is damaged", exit_code=65),
    Mistake("inspect a damaged checkpoint", "convert inspect runs/torn", "runs/torn/checkpoints/2 is damaged", exit_code=65),
    Mistake("convert onto a folder", "convert runs/done texts", "texts already exists"),
    Mistake("unknown option of convert", "convert runs/done out --to legacy", "unrecognized arguments: --to legacy"),
    Mistake("inspect nothing", "convert inspect", "the following arguments are required: PATH"),
    # ckpt
    Mistake("nothing to do with checkpoints", "ckpt", "the following arguments are required: COMMAND"),
    Mistake("unknown part of ckpt", "ckpt list", "argument COMMAND: invalid choice: 'list'"),
    Mistake("mistyped part of ckpt", "ckpt verfy runs/done", 'did you mean "verify"?'),
    Mistake("list no run", "ckpt ls texts", "texts is not a run folder: it has no config.json"),
    Mistake("list without checkpoint", "ckpt ls runs/fresh", "runs/fresh has no checkpoint yet; train it until it has saved one"),
    Mistake("verify without checkpoint", "ckpt verify nowhere", "nowhere has no checkpoint yet"),
    Mistake("verify a step that is not there", "ckpt verify runs/torn 1 3", "runs/torn has no checkpoint of step 3; it has 1, 2"),
    Mistake("verify a step in words", "ckpt verify runs/done last", "argument STEP: invalid int value: 'last'"),
    Mistake("prune to nothing", "ckpt prune runs/done --keep=0", "--keep is 0; it must be at least 1"),
    Mistake("prune to every none", "ckpt prune runs/done --keep-every=0", "--keep-every is 0; it must be at least 1"),
    Mistake("prune what is all damaged", "ckpt prune runs/torn", "no checkpoint is intact: restore one from a backup", exit_code=65),
    Mistake("mistyped option of prune", "ckpt prune runs/done --dryrun", 'unrecognized arguments: --dryrun; did you mean "--dry-run"?'),
    Mistake("compare with nothing", "ckpt diff runs/done", "the following arguments are required: RUN[:STEP]"),
    Mistake("compare a step that is not there", "ckpt diff runs/done:1 runs/done:2", "runs/done has no checkpoint of step 2; it has 1"),
    Mistake("compare a run that is not there", "ckpt diff runs/done runs/nowhere:3", "runs/nowhere has no checkpoint"),
    Mistake("compare a damaged step", "ckpt diff runs/done runs/torn:2", "runs/torn/checkpoints/2 is damaged: weights/_METADATA is missing", exit_code=65),
    Mistake("compare what is no step", "ckpt diff runs/done runs/done:last", "runs/done:last has no checkpoint"),
    Mistake("reshape to nowhere", "ckpt reshape runs/done", "the following arguments are required: OUT"),
    Mistake("reshape a step that is not there", "ckpt reshape runs/done:7 new", "runs/done has no checkpoint of step 7; it has 1"),
    Mistake("reshape what is damaged", "ckpt reshape runs/torn:1 new", "runs/torn/checkpoints/1 is damaged: training/_METADATA is missing", exit_code=65),
    Mistake("reshape onto a folder", "ckpt reshape runs/done texts", "texts already exists; choose an empty folder or one that does not exist"),
    Mistake("reshape onto a file", "ckpt reshape runs/done small.py", "small.py already exists"),
    Mistake("reshape onto itself", "ckpt reshape runs/done runs/done", "runs/done is runs/done or inside it; choose another folder"),
    Mistake("reshape into itself through a link", "ckpt reshape runs/done links/done/new", "links/done/new is runs/done or inside it"),
    Mistake("reshape to another type", "ckpt reshape runs/done new --dtype=float16", "argument --dtype: invalid choice: 'float16'"),
    Mistake("reshape and go on from rounded weights", "ckpt reshape runs/done new --dtype=bfloat16", "a run cannot resume from weights in bfloat16, because small updates are lost in rounding; add --weights-only"),
    Mistake("reshape to where nobody can write", "ckpt reshape runs/done /proc/none/new --weights-only", "/proc/none: No such file or directory"),
    # bench
    Mistake("unknown benchmark", "bench speed", "argument what: invalid choice: 'speed'"),
    Mistake("mistyped benchmark", "bench chekpoint", 'did you mean "checkpoint"?'),
    Mistake("no rounds", "bench kernels --rounds 0", "--rounds is 0; it must be at least 1"),
    Mistake("rounds of what has none", "bench optimizers --rounds 3", "unrecognized arguments: --rounds 3"),
)  # fmt: skip


def make_workspace(root: pathlib.Path) -> None:
    """Creates the files of the command lines above; `runs/done` has a checkpoint of zeros."""
    corpus = build_small_corpus(root / "corpus")
    (root / "corpus_texts").rename(root / "texts")
    _write_bad_corpora(root, corpus)
    values = small_values(run_folder="runs/small", corpus="corpus")
    (root / "small.py").write_text(
        f"import ml_collections\n\n\ndef get_config():\n    return ml_collections.ConfigDict({values!r})\n"
    )
    (root / "phased.py").write_text(
        f"import ml_collections\n\n\ndef get_config():\n    return ml_collections.ConfigDict({phased_values()!r})\n"
    )
    (root / "empty.py").write_text("")
    (root / "plain.py").write_text("def get_config():\n    return {}\n")
    for name in ("foreign", "broken", "hollow", "hf"):
        (root / name).mkdir()
    (root / "hf" / "config.json").write_text("{}")
    (root / "foreign" / "config.json").write_text('{"architectures": ["ZayaForCausalLM"]}')
    (root / "broken" / "config.json").write_text('{"model"')
    config = Config.from_dict(values | {"run_folder": "runs/done"})
    for name in ("done", "fresh"):
        (root / "runs" / name).mkdir(parents=True)
        (root / "runs" / name / "config.json").write_text(config.to_text())
    zeros = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), abstract_variables(config.model)
    )
    with Checkpoints(root / "runs" / "done", retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(1, weights=zeros, training={"step": np.int32(1)})
    _write_bad_runs(root, values)


def _write_bad_runs(root: pathlib.Path, values: dict) -> None:
    """Writes a run whose checkpoints all miss a file, a run that contains its own inputs, and links to such runs."""
    config = Config.from_dict(values)
    for name in ("torn", "odd", "home"):
        (root / "runs" / name).mkdir()
        config = dataclasses.replace(config, run_folder=f"runs/{name}")
        (root / "runs" / name / "config.json").write_text(config.to_text())
    for step, item in (("1", "training"), ("2", "weights")):
        folder = root / "runs/torn/checkpoints" / step
        shutil.copytree(root / "runs/done/checkpoints/1", folder)
        commit_folder(folder, int(step))
        (folder / item / "_METADATA").unlink()
    # Otherwise commands that only read weights would use step 1, whose weights are complete.
    (root / "runs/torn/checkpoints/1/weights/_METADATA").write_text("")
    (root / "runs/odd/checkpoints").write_text("")
    (root / "runs/home/corpus").mkdir()
    (root / "runs/home/outside").symlink_to(root / "corpus")
    (root / "short/texts").mkdir()
    (root / "short/texts/text.py").write_text("x = 1\n")
    files = of_tokenizer(DataConfig(), config.model, story=()).files
    (root / "short/tokenizer.json").write_bytes(files["tokenizer.json"])
    (root / "links").mkdir()
    places = {"done": "runs/done", "home": "runs/home", "corpus": "runs/home/corpus", "texts": "short/texts"}
    for name, place in places.items():
        (root / "links" / name).symlink_to(root / place)


def phased_values() -> dict:
    """Returns a config with two phases, of which the second has a corpus that is too short."""
    values = small_values(run_folder="runs/phased", corpus="corpus")
    del values["train"]["num_steps"]
    values["data"]["mixtures"] = ({"name": "m", "corpora": ("corpus", "short"), "weights": (3, 1)},)
    values["phases"] = (
        {"name": "a", "steps": 12, "data": {"batch_ramp": ((9, 128),)}},
        {
            "name": "b",
            "steps": 8,
            "data": {"mixture": "m", "sequence_length": 128},
            "optimizer": {"warmup_steps": 0},
        },
    )
    return values


def _write_bad_corpora(root: pathlib.Path, corpus: Corpus) -> None:
    """Writes a corpus with a truncated shard, one with hardly any tokens, and files that are not text."""
    shutil.copytree(corpus.folder, root / "damaged")
    shard = root / "damaged" / corpus.train.shards[0].file
    shard.write_bytes(shard.read_bytes()[:10])
    (root / "blank").mkdir()
    (root / "blank" / "empty.txt").write_text("")
    (root / "blank" / "latin.txt").write_bytes(b"\xe9")
    (root / "letter").write_text("a")
    (root / "records.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (root / "kinds").mkdir()
    (root / "kinds" / "notes.txt").write_text("some text")
    (root / "kinds" / "records.jsonl").write_text('{"text": "one"}\n')
    (root / "crumbs").mkdir()
    for i in range(8):
        (root / "crumbs" / f"{i}.txt").write_text(str(i))
    build_corpus(
        root / "short",
        source=str(root / "crumbs"),
        tokenizer=ByteTokenizer(),
        block_tokens=BLOCK_TOKENS,
        validation_percent=50,
    )


def run(command: str) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error of `zaya COMMAND`."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(shlex.split(command))
        except SystemExit as leaving:
            code = leaving.code or 0
    return code, out.getvalue(), err.getvalue()


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int] | None]:
    """Returns all paths with what detects a change; times of folders are excluded, because of a run's lock."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


_compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: _compilations.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    root = tmp_path_factory.mktemp("workspace").resolve()
    make_workspace(root)
    return root


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "_"))
def test_a_mistake_ends_with_one_message(mistake, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("ZAYA_ROCM_WHEELS", "no_wheels")
    before = snapshot(workspace)
    _compilations.clear()
    code, out, err = run(mistake.command)
    sentence = err.replace(f"{workspace}/", "")
    assert code == mistake.exit_code
    assert out == ""
    assert mistake.says in sentence
    assert sentence.startswith("zaya: ")
    assert sentence.count("\n") == 1
    assert sentence.endswith("\n")
    assert not _compilations
    assert snapshot(workspace) == before


def test_compilations_are_detected():
    _compilations.clear()
    jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(3)).compile()
    assert _compilations


def test_mistakes_have_unique_names():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(("prompt", "token"), [([2, 264], 264), ([-1], -1)])
def test_a_prompt_outside_the_vocabulary_is_refused(prompt, token, tmp_path):
    config = small_config(run_folder=tmp_path, corpus=tmp_path)
    with pytest.raises(ValueError, match=rf"token {token} at position .* outside the vocabulary of 264"):
        zaya_jax.generate(zaya_jax.Zaya(config.model), {}, prompt, max_new_tokens=1)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_shows_examples(command):
    code, out, err = run(f"{command} --help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: zaya {command}")
    examples = out.partition("examples:\n")[2].splitlines()
    assert len(examples) >= 3
    assert all(f"zaya {command}" in line for line in examples)


@pytest.mark.parametrize("command", ["", "--help"])
def test_usage_lists_the_commands(command):
    code, out, err = run(command)
    assert (code, err) == (0, "")
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


def test_versions_are_printed():
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    versions = f"zaya_jax {project['version']}, jax {jax.__version__}"
    assert run("--version") == (0, f"{versions}\n", "")
    assert versions in run("--help")[1]


def test_a_checkout_that_is_not_installed_has_its_usage(monkeypatch):
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", _no_package)
    assert run("--version") == (0, "zaya_jax (not installed), jax (not installed)\n", "")
    assert run("--help")[0] == 0


def _no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_table_of_weights_fits_80_columns(workspace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(f"convert inspect {workspace}/runs/done")
    assert code == 0
    assert "…" not in out
    table = [line for line in out.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    cells = [line.split("│")[1].strip() for line in table if line.startswith("│")]
    assert "layers/attention_residual/residual_scale" in "".join(cells)
    assert "127,872 (124.88 KiB)" in out  # 31,968 values of 4 bytes
    assert "0.00 GiB" not in out


def test_the_table_of_a_corpus_fits_80_columns(tmp_path, workspace, monkeypatch):
    """The table of a corpus of any size, up to a terabyte."""
    monkeypatch.setenv("COLUMNS", "80")
    corpus = open_corpus(workspace / "corpus")
    train = dataclasses.replace(
        corpus.train, documents=300_000_000, skipped=30_000, text_bytes=900 * 10**9, tokens=810 * 10**9
    )
    monkeypatch.setattr(
        "zaya_jax.data.corpora.command.build_corpus",
        lambda *_, **__: dataclasses.replace(corpus, train=train),
    )
    code, out, _ = run(f"data build {tmp_path}/new")
    assert code == 0
    assert "…" not in out
    (row,) = [line.split() for line in out.splitlines() if "train" in line]
    assert row == ["train", "300,000,000", "30,000", "900,000,000,000", "810,000,000,000"]


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("def main(argv):\n    pass\n", "def main(argv):"),
        ("\n \t\n  The  quick\tbrown fox\n", "The quick brown fox"),
        ('It\'s "$HOME" `ls` \\n !! *\n', 'It\'s "$HOME" `ls` \\n !! *'),
        ("--- title: x", "--- title: x"),
        ("-x", "-x"),
        ("\x00\x1b[31m\u202e\ufffdred\r\nnext", "[31m red"),
        ("été 東京 🙂", "été 東京 🙂"),
        ("one two three four five six seven eight nine", "one two three four five six seven eight"),
        ("x" * 50, "x" * 40),
    ],
)
def test_the_proposed_command_is_one_for_a_shell(text, prompt, workspace, monkeypatch):
    """A shell splits the proposed command into the intended words, which `zaya generate` accepts."""
    command = generate_command("runs/it's mine", text)
    assert "\n" not in command
    show = "zaya() { printf '%s\\n' \"$@\"; }\n"
    done = subprocess.run(["sh", "-c", show + command], stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().splitlines() == ["generate", "runs/it's mine", f"--prompt={prompt}"]
    monkeypatch.chdir(workspace)
    assert run(command.removeprefix("zaya "))[2].startswith("zaya: generate: runs/it's mine is not")


@pytest.mark.parametrize("text", ["", " \n\n", "\x00\x07\ufffd\n\u200b"])
def test_without_text_no_prompt_is_proposed(text):
    assert generate_command("runs/tiny", text) == "zaya generate runs/tiny"


def test_a_bug_keeps_its_traceback(monkeypatch):
    """A ValueError of a library is a bug of this package: it keeps its traceback."""
    monkeypatch.setattr("zaya_jax.commands.train.load_config", lambda *_: np.zeros(2).reshape(3))
    with pytest.raises(ValueError, match="reshape"):
        cli.main(["train"])


@pytest.mark.parametrize("command", list(cli.COMMANDS))
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "runs/x: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "a", None, "b"), "a -> b: Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("Cannot call rmtree on a symbolic link"), "Cannot call rmtree on a symbolic link"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else type(value).__name__,
)
def test_errors_of_the_system_are_one_message(command, error, sentence, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(f"{cli.COMMANDS[command][0]}.main", fail)
    assert run(command) == (2, "", f"zaya: {command}: {sentence}\n")


def in_a_shell(script: str) -> tuple[int, str, str]:
    """Returns exit code and both outputs of a shell script that calls `zaya`."""
    python = f'zaya() {{ {shlex.quote(sys.executable)} -m zaya_jax.cli "$@"; }}\n'
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(pathlib.Path(cli.__file__).parents[1])
    done = subprocess.run(
        ["bash", "-c", python + script], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command", ["", "data build --help", "plan --config=configs/tiny.py --gpus-per-node=1"]
)
def test_a_reader_that_leaves_ends_it_silently(command):
    script = f"zaya {command} | true; exit ${{PIPESTATUS[0]}}"
    assert in_a_shell(script) == (141, "", "")


@pytest.mark.parametrize("command", ["", "data build --help"])
def test_failed_output_is_reported(command):
    about = f"{command.split()[0]}: " if command else ""
    says = f"zaya: {about}standard output: No space left on device\n"
    assert in_a_shell(f"zaya {command} > /dev/full") == (2, "", says)


def test_a_corpus_is_built_and_replaced(tmp_path, workspace):
    command = f"data build {tmp_path}/new --source {workspace}/texts --validation-percent 20"
    assert run(command)[0] == 0
    assert run(command)[0] == 2
    assert run(command + " --overwrite")[0] == 0


def print_table() -> None:
    """Prints all mistakes and messages as Markdown."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        root = pathlib.Path(folder).resolve()
        make_workspace(root)
        print("| mistake | `zaya ...` | says |\n|---|---|---|")
        for mistake in MISTAKES:
            code, _, err = run(mistake.command)
            message = err.strip().replace(f"{root}/", "").replace("\n", "<br>").replace("|", "\\|")
            command = mistake.command.replace("a" * 100, "aaa...")
            print(f"| {mistake.name} | `{command}` | {message} ({code}) |")


if __name__ == "__main__":
    print_table()
