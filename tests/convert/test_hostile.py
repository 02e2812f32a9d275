# ruff: noqa: E501 (the table of inputs has a line each)
"""Broken and hostile inputs: each ends with exit code 2 and one message, and leaves no files.

`python tests/convert/test_hostile.py` prints the table of inputs and sentences.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shlex
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from small_weights import edit_header, join, random_variables, small_config, split

import zaya_jax
from zaya_jax import cli
from zaya_jax.files import durable

SHARD = "model-00001-of-00004.safetensors"
LAST = "model-00004-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
WEIGHTS = "checkpoints/0/weights"
TABLE = f"{WEIGHTS}/params.embedding.table/.zarray"


DAMAGED = {
    "checkpoint that no sum is of",
    "checkpoint with a pipe",
    "checkpoint with empty checksums",
    "checkpoint without a part",
    "checksums a pipe",
    "forged: array metadata cut off",
    "forged: no names of weights",
    "forged: part cut off",
    "forged: parts larger than memory",
    "forged: parts without end",
    "forged: without a part",
    "part of a checkpoint cut off",
    "verifying against another network",
}
"""Of what was written here and is not as it was: the exit code says so."""


@dataclasses.dataclass(frozen=True)
class Hostile:
    """An input that must be refused.

    Attributes:
      name: of what is wrong.
      change: makes it wrong; gets a copy of good folders "native", "legacy", "whole" (one file) and "run".
      says: what the sentence must contain.
      command: what follows `zaya convert`.
    """

    name: str
    change: Callable[[pathlib.Path], Any]
    says: str
    command: str = "native out"


def header(change: Callable[[dict], Any], file: str = SHARD) -> Callable[[pathlib.Path], None]:
    return lambda root: edit_header(root / "native" / file, change)


def entry(field: str, value: Any) -> Callable[[pathlib.Path], None]:
    return header(lambda head: head[EMBEDDING].update({field: value}))


def raw(change: Callable[[bytes], bytes], file: str = SHARD) -> Callable[[pathlib.Path], None]:
    return lambda root: (root / "native" / file).write_bytes(change((root / "native" / file).read_bytes()))


def fields(folder: str, file: str, change: Callable[[dict], Any]) -> Callable[[pathlib.Path], None]:
    def edit(root: pathlib.Path) -> None:
        path = root / folder / file
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return edit


def config(**values: Any) -> Callable[[pathlib.Path], None]:
    return fields("native", "config.json", lambda old: old.update(values))


def legacy(**values: Any) -> Callable[[pathlib.Path], None]:
    return fields("legacy", "config.json", lambda old: old.update(values))


def index(change: Callable[[dict], Any]) -> Callable[[pathlib.Path], None]:
    return fields("native", INDEX, lambda values: change(values["weight_map"]))


def whole(change: Callable[[dict[str, tuple[dict, bytes]]], Any]) -> Callable[[pathlib.Path], None]:
    """Changes the tensors of the folder with one file, and rewrites the file."""

    def edit(root: pathlib.Path) -> None:
        file = root / "whole" / "model.safetensors"
        head, data = split(file)
        head.pop("__metadata__")
        tensors = {name: (e, data[slice(*e["data_offsets"])]) for name, e in head.items()}
        change(tensors)
        new, offset = {}, 0
        for name, (e, part) in tensors.items():
            new[name] = e | {"data_offsets": [offset, offset + len(part)]}
            offset += len(part)
        file.write_bytes(join(new, b"".join(part for _, part in tensors.values())))

    return edit


def retyped(name: str, dtype: str, factor: float) -> Callable[[pathlib.Path], None]:
    """A tensor of another type, whose values take `factor` of the bytes."""

    def change(tensors: dict[str, tuple[dict, bytes]]) -> None:
        e, part = tensors[name]
        tensors[name] = (e | {"dtype": dtype}, (part * 4)[: int(len(part) * factor)])

    return whole(change)


def rename(tensors: dict[str, Any], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def only_pickle(root: pathlib.Path) -> None:
    for file in (root / "native").glob("*.safetensors"):
        file.unlink()
    (root / "native" / INDEX).unlink()
    (root / "native" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def sparse_header(root: pathlib.Path) -> None:
    """Writes a sparse file of 200 MB, and a header that claims most of it."""
    with (root / "native" / SHARD).open("wb") as stream:
        stream.write((150_000_000).to_bytes(8, "little"))
        stream.truncate(200_000_000)


def own_head(tensors: dict[str, tuple[dict, bytes]]) -> None:
    e, part = tensors[EMBEDDING]
    tensors["lm_head.weight"] = (e, part[:-2] + b"\x01\x02")


def cut(file: str) -> Callable[[pathlib.Path], None]:
    return lambda root: (root / "run" / WEIGHTS / file).write_bytes(
        (root / "run" / WEIGHTS / file).read_bytes()[:7]
    )


def without_a_part(root: pathlib.Path) -> None:
    (root / "run" / WEIGHTS / "params.layers.experts.down_proj/1.2.0.0").unlink()


def zarray(**values: Any) -> Callable[[pathlib.Path], None]:
    return forged(fields("run", TABLE, lambda old: old.update(values)))


def remains(change: Callable[[pathlib.Path, pathlib.Path], Any]) -> Callable[[pathlib.Path], None]:
    """Puts files where a conversion has its temporary folder; the edit receives that folder and a foreign
    one.
    """

    def edit(root: pathlib.Path) -> None:
        (root / "theirs").mkdir()
        (root / "theirs/lock").write_text("precious")
        change(root / "out.partial", root / "theirs")

    return edit


def inside(change: Callable[[pathlib.Path, pathlib.Path], Any]) -> Callable[[pathlib.Path], None]:
    return remains(lambda aside, theirs: (aside.mkdir(), change(aside, theirs)))


def forged(change: Callable[[pathlib.Path], None]) -> Callable[[pathlib.Path], None]:
    """Recomputes the checksums, as an attacker would: they must not be the only protection."""

    def edit(root: pathlib.Path) -> None:
        change(root)
        run = root / "run"
        names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
        names.remove(durable.CHECKSUMS)
        durable.write_checksums(run, {name: durable.sha256_of_file(run / name) for name in names})

    return edit


NOTHING = lambda root: None  # noqa: E731

HOSTILE = (
    # safetensors: the file
    Hostile("header longer than the file", raw(lambda b: (2**40).to_bytes(8, "little") + b[8:]), "its header would have 1,099,511,627,776 bytes; the file has"),
    Hostile("header longer than the format allows", sparse_header, "(a header has at most 100,000,000)"),
    Hostile("file of three bytes", raw(lambda b: b[:3]), "has 3 bytes; a safetensors file starts with 8"),
    Hostile("empty file", raw(lambda b: b""), "has 0 bytes"),
    Hostile("file cut off", raw(lambda b: b[:-5]), "is truncated: it has"),
    Hostile("bytes after the data", raw(lambda b: b + b"tail"), "has 4 bytes that belong to no tensor"),
    Hostile("header not JSON", header(lambda head: b"{'a': 1}"), "is not JSON: Expecting property name"),
    Hostile("header not UTF-8", header(lambda head: b'{"\xff": 1}'), "is not JSON: 'utf-8' codec can't decode"),
    Hostile("header a list", header(lambda head: b"[1]"), "holds a list; it must be a JSON object"),
    Hostile("header nested without end", header(lambda head: b'{"a":' * 100_000), "nested too deeply"),
    Hostile("number of 5,000 digits", header(lambda head: b'{"a":' + b"1" * 5000 + b"}"), "is not JSON: Exceeds the limit"),
    Hostile("tensor twice", header(lambda head: json.dumps(head).encode()[:-1] + f', "{EMBEDDING}": {{}}}}'.encode()), f'has "{EMBEDDING}" twice'),
    # safetensors: a tensor
    Hostile("entry without place", header(lambda head: head[EMBEDDING].pop("data_offsets") and None), "must have dtype, shape and data_offsets"),
    Hostile("entry that is a number", header(lambda head: head.update({EMBEDDING: 3})), "must have dtype, shape and data_offsets; it is 3"),
    Hostile("type that is none", entry("dtype", "BF17"), "has type 'BF17', which the format does not have"),
    Hostile("type that is a list", entry("dtype", ["F32"]), "has type ['F32']"),
    Hostile("negative shape", entry("shape", [-70, -20]), "has shape [-70, -20]; it must be a list of integers"),
    Hostile("true for a size", entry("shape", [True, 1400]), "has shape [True, 1400]"),
    Hostile("shape beyond memory", entry("shape", [2**62, 2**62]), "its shape [4611686018427387904, 4611686018427387904] of BF16 needs 42,535"),
    Hostile("place beyond the file", header(lambda head: head.update({EMBEDDING: {"dtype": "U8", "shape": [2**50], "data_offsets": [0, 2**50]}})), "is truncated: it has"),
    Hostile("end before begin", entry("data_offsets", [2800, 0]), "has data_offsets [2800, 0]; they must be its start and end"),
    Hostile("overlapping tensors", header(lambda head: head["model.input_hidden_states_scale"].update(data_offsets=[0, 40])), "overlaps the previous one"),
    Hostile("gap between tensors", header(lambda head: [e.update(data_offsets=[x + 8 for x in e["data_offsets"]]) for n, e in head.items() if n.startswith("model")] and None), "follows a gap"),
    # the index
    Hostile("index leads out of the folder", index(lambda m: m.update({NORM: "../whole/model.safetensors"})), 'lists the file "../whole/model.safetensors"; it must be a file in the same folder'),
    Hostile("index with an absolute path", index(lambda m: m.update({NORM: "/etc/passwd"})), 'lists the file "/etc/passwd"'),
    Hostile("index with a number for a file", index(lambda m: m.update({NORM: 7})), "7 is missing"),
    Hostile("shard missing", lambda root: (root / "native" / LAST).unlink(), f"{LAST} is missing, but {INDEX} lists tensors in it"),
    Hostile("index names a tensor that no shard has", index(lambda m: m.update({"model.more": SHARD})), f"{SHARD} lacks model.more, unlike"),
    Hostile("shard has a tensor that the index lacks", index(lambda m: m.pop(NORM)), f"also has {NORM}, unlike"),
    Hostile("index without files", fields("native", INDEX, lambda v: v.update(weight_map=[])), "has no weight_map"),
    Hostile("shards without index", lambda root: (root / "native" / INDEX).unlink(), f"but no {INDEX}, which must list"),
    Hostile("pickle only", only_pickle, "only pickle files (pytorch_model.bin), which can execute arbitrary code"),
    # config.json
    Hostile("no config.json", lambda root: (root / "native/config.json").unlink(), "native has no config.json"),
    Hostile("a config field twice", lambda root: (root / "native/config.json").write_text('{"hidden_size": 20, "hidden_size": 2}'), 'config.json has "hidden_size" twice'),
    Hostile("layers without end", config(num_hidden_layers=10**12, layer_types=None), "num_hidden_layers is 1000000000000; it must be an integer from 1 to 10,000"),
    Hostile("vocabulary without end", config(vocab_size=10**15), "describes 20,000,000,000,0"),
    Hostile("negative epsilon", config(rms_norm_eps=-1), "config.json: model.rms_norm_eps is -1.0; it must be above 0"),
    Hostile("epsilon of nothing", config(rms_norm_eps=0), "model.rms_norm_eps is 0.0; it must be above 0"),
    Hostile("epsilon that is no number", config(rms_norm_eps=float("nan")), "model.rms_norm_eps is nan; it must be a finite number"),
    Hostile("true for an epsilon", config(rms_norm_eps=True), "model.rms_norm_eps is True; it must be a finite number"),
    Hostile("negative initial weights", config(initializer_range=-0.02), "model.initializer_range is -0.02; it must be above 0"),
    Hostile("true for a width", config(hidden_size=True), "model.hidden_size is True; it must be a whole number"),
    Hostile("number for a switch", config(lm_head_bias=0), "model.lm_head_bias is 0; it must be True or False"),
    Hostile("true for a number of experts a token", config(num_experts_per_tok=True), "num_experts_per_tok is True; only 1 is supported"),
    Hostile("number for a bias", legacy(attention_bias=0), "attention_bias is 0; only False is supported", "legacy out"),
    Hostile("legacy negative epsilon", legacy(norm_epsilon=-1e-5), "model.rms_norm_eps is -1e-05; it must be above 0", "legacy out"),
    Hostile("infinite base", config(rope_parameters={"hybrid": {"rope_theta": float("inf"), "partial_rotary_factor": 0.5}}), "model.rope_theta is inf; it must be a finite number"),
    Hostile("end token of text", config(eos_token_id="x"), "config.json: eos_token_id has 'x'; it must be an integer from 0 to 69, a list of those or null"),
    Hostile("end token beyond the vocabulary", config(eos_token_id=[1, 70]), "eos_token_id has 70; it must be an integer from 0 to 69"),
    Hostile("true for an end token", config(eos_token_id=True), "eos_token_id has True"),
    Hostile("end token that is none", config(eos_token_id=[None]), "eos_token_id has None"),
    Hostile("beginnings of several tokens", config(bos_token_id=[1, 2]), "bos_token_id has [1, 2]; it must be an integer from 0 to 69 or null"),
    Hostile("negative padding", legacy(pad_token_id=-1), "pad_token_id has -1", "legacy out"),
    Hostile("end token of generation", lambda root: (root / "native/generation_config.json").write_text('{"eos_token_id": 1.5}'), "generation_config.json: eos_token_id has 1.5; it must be an integer"),
    Hostile("generation config that is none", lambda root: (root / "native/generation_config.json").write_text("[]"), "generation_config.json holds a list; it must be a JSON object"),
    Hostile("text for a width", config(hidden_size="20"), "model.hidden_size is '20'; it must be a whole number"),
    Hostile("layer types of lists", config(layer_types=[[], []]), "layer_types is [[], []]; it must be a list of names"),
    Hostile("rope parameters of text", config(rope_parameters="yarn"), "rope_parameters is 'yarn'; it must be a section"),
    Hostile("another activation", config(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu' is supported"),
    Hostile("another model", config(model_type="llama"), 'has model_type "llama"; it must be "zaya"'),
    Hostile("config of the other layout", lambda root: shutil.copy(root / "legacy/config.json", root / "native/config.json"), "its tensors have the native layout, but its config.json has the legacy one"),
    Hostile("legacy with clamped temperatures", legacy(clamp_temp=True), "clamp_temp is True; only False is supported", "legacy out"),
    Hostile("legacy stages that do not alternate", legacy(zaya_layers=["a", "a", 3, 3]), "it must alternate between", "legacy out"),
    Hostile("legacy with an odd number of stages", legacy(num_hidden_layers=5), "num_hidden_layers is 5; it must be even, because it counts two stages per layer", "legacy out"),
    Hostile("legacy heads that contradict", legacy(num_query_groups=1), "num_query_groups is 1 and num_key_value_heads 2; they must be equal", "legacy out"),
    Hostile("legacy windows of two sizes", legacy(swa_layers=[4, 0, 5, 0]), "swa_layers has windows of [4, 5]; they must be equal", "legacy out"),
    Hostile("legacy without epsilon", fields("legacy", "config.json", lambda v: v.pop("norm_epsilon")), "norm_epsilon is missing", "legacy out"),
    # tensors
    Hostile("tensor missing", whole(lambda t: t.pop(NORM)), f"1 tensor missing: {NORM} [20]", "whole out"),
    Hostile("tensor unknown", whole(lambda t: t.update({"model.more": t[NORM]})), "1 tensor unknown: model.more [20]", "whole out"),
    Hostile("tensor of another shape", whole(lambda t: t.update({NORM: (t[NORM][0] | {"shape": [4, 5]}, t[NORM][1])})), f"{NORM} is [4, 5] and must be [20]", "whole out"),
    Hostile("layouts mixed", whole(lambda t: rename(t, "model.layers.1.mlp.gate.down_proj.weight", "model.layers.3.zaya_block.router.down_proj.weight")), "mixes two layouts", "whole out"),
    Hostile("no ZAYA weights", whole(lambda t: [t.pop(n) for n in list(t) if "layers" in n]), "has no ZAYA1 weights", "whole out"),
    Hostile("untied head", whole(own_head), "only a tied head is supported", "whole out"),
    Hostile("double precision", retyped(NORM, "F64", 4), f"has tensors of unsupported types: {NORM} (F64); supported types are F32, BF16, F16", "whole out"),
    Hostile("FP8 experts", retyped("model.layers.0.mlp.experts.down_proj", "F8_E4M3", 0.5), "is quantized: model.layers.0.mlp.experts.down_proj (F8_E4M3)", "whole out"),
    Hostile("MXFP4 experts", retyped("model.layers.0.mlp.experts.down_proj", "F4", 0.25), "(F4); but its config.json has no quantization_config, which says how", "whole out"),
    Hostile("another method of quantization", config(quantization_config={"quant_method": "gptq"}), "the weights are quantized by 'gptq', which is not supported"),
    Hostile("a config that says quantised", config(quantization_config={"quant_method": "mxfp4"}), "says that the weights are quantized (mxfp4 by group of 1 x 32), but no tensor has quantized values"),
    # runs
    Hostile("checkpoint without a part", without_a_part, "run/checkpoints/0 is damaged: weights/params.layers.experts.down_proj/1.2.0.0 is missing", "run out"),
    Hostile("part of a checkpoint cut off", cut("params.embedding.table/0.0"), "params.embedding.table/0.0 is not as it was written: its checksum differs", "run out"),
    Hostile("checkpoint with empty checksums", lambda root: (root / "run/SHA256SUMS").write_text(""), "run/SHA256SUMS has '' in line 1", "run out"),
    Hostile("checkpoint that no sum is of", lambda root: (root / "run/SHA256SUMS").write_text(f"{'0' * 64}  config.json\n"), "run/checkpoints/0 is damaged: SHA256SUMS lists none of its files", "run out"),
    Hostile("checkpoint with a pipe", lambda root: os.mkfifo(root / "run" / WEIGHTS / "pipe"), "weights/pipe is neither a file nor a folder", "run out"),
    Hostile("forged: without a part", forged(without_a_part), "params.layers.experts.down_proj has 5 of 6 chunks; it is damaged", "run out"),
    Hostile("forged: part cut off", forged(cut("params.embedding.table/0.0")), "embedding/table is damaged", "run out"),
    Hostile("forged: array metadata cut off", forged(cut("params.embedding.table/.zarray")), "the array params.embedding.table cannot be opened", "run out"),
    Hostile("forged: checkpoint metadata cut off", forged(cut("_METADATA")), "_METADATA is not JSON", "run out"),
    Hostile("forged: parts without end", zarray(chunks=[10**12, 10**12]), "the array params.embedding.table cannot be opened", "run out"),
    Hostile("forged: parts larger than memory", zarray(chunks=[10**10, 20]), "has shape (70, 20), and chunks of (10000000000, 20) are larger", "inspect run"),
    Hostile("forged: weights of whole numbers", zarray(dtype="<i8"), "params.embedding.table has type int64; it must be one of float32, float16, bfloat16", "run out"),
    Hostile("forged: no names of weights", forged(fields("run", f"{WEIGHTS}/_METADATA", lambda v: v.update(tree_metadata={"x": 3}))), "_METADATA has no valid tree_metadata; it was not written by Orbax", "run out"),
    Hostile("checksums a pipe", lambda root: ((root / "run/SHA256SUMS").unlink(), os.mkfifo(root / "run/SHA256SUMS")), "run/checkpoints/0 is damaged: manifest.json is missing", "run out"),
    Hostile("shard a pipe", lambda root: ((root / "native" / SHARD).unlink(), os.mkfifo(root / "native" / SHARD)), f"native/{SHARD} is a pipe; it must be a regular file"),
    # files in the place of the temporary folder
    Hostile("remains a link", remains(lambda aside, theirs: aside.symlink_to(theirs)), "out.partial was not left by a conversion (it is a link); remove it"),
    Hostile("remains with a pipe", inside(lambda aside, _: os.mkfifo(aside / "lock")), "out.partial was not left by a conversion (lock is neither a file nor a folder); remove it"),
    Hostile("remains with a link", inside(lambda aside, theirs: (aside / "lock").symlink_to(theirs / "lock")), "(lock is neither a file nor a folder)"),
    Hostile("remains with linked content", inside(lambda aside, theirs: (aside / "content").symlink_to(theirs)), "(content is neither a file nor a folder)"),
    Hostile("run without checkpoint", lambda root: shutil.rmtree(root / "run/checkpoints"), "run has no checkpoint yet", "run out"),
    Hostile("run of another network", fields("run", "config.json", lambda v: v["model"].update(hidden_size=22)), "does not match the run's config.json", "run out"),
    Hostile("skip class that Hugging Face lacks", fields("run", "config.json", lambda v: v["model"].update(skip_class="identity", num_experts=3, router="linear")), 'model.router is "linear"', "run out"),
    # the command
    Hostile("source that is not there", NOTHING, "nowhere does not exist; give the folder of a run", "nowhere out"),
    Hostile("source that is a file", NOTHING, "config.json is a file; give the folder", "native/config.json out"),
    Hostile("target that is there", NOTHING, "legacy already exists; add --overwrite to replace a folder that zaya convert wrote", "native legacy"),
    Hostile("target inside the source", NOTHING, "native/out is native or inside it", "native native/out"),
    Hostile("target that is the source", NOTHING, "native is native or inside it", "native native --overwrite"),
    Hostile("overwriting what was made by others", lambda root: (root / "legacy/SHA256SUMS").unlink(), "legacy was not written by zaya convert", "native legacy --overwrite"),
    Hostile("unknown layout", NOTHING, "argument --layout: invalid choice: 'gguf'", "native out --layout gguf"),
    Hostile("unknown type", NOTHING, 'dtype is "int4"; it must be float32, bfloat16, float16', "native out --dtype int4"),
    Hostile("no size", NOTHING, '--max-shard-size is "5 G"; it must be a size such as 5GB', "native out --max-shard-size '5 G'"),
    Hostile("inspecting nothing", NOTHING, "nowhere does not exist", "inspect nowhere"),
    Hostile("verifying against another network", fields("legacy", "config.json", lambda v: v.update(norm_epsilon=0.5)), "legacy/config.json is not as it was written: its checksum differs", "native legacy --verify"),
)  # fmt: skip


def make_good(root: pathlib.Path) -> None:
    """Writes folders that convert without an error."""
    network = small_config(num_hidden_layers=2)
    model, variables = zaya_jax.Zaya(network), random_variables(network, 0, "bfloat16")
    zaya_jax.save_pytorch(root / "native", model, variables, max_shard_bytes=8000)
    zaya_jax.save_pytorch(root / "whole", model, variables)
    zaya_jax.save_pytorch(root / "legacy", model, variables, layout="legacy")
    code, out, err = run("whole run", root)
    assert (code, err) == (0, ""), out


def run(command: str, root: pathlib.Path) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error of `zaya convert COMMAND` in a folder."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.chdir(root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(["convert", *shlex.split(command)])
        except SystemExit as leaving:
            code = leaving.code or 0
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module", name="good")
def fixture_good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    make_good(root)
    shards = sorted(file.name for file in (root / "native").glob("*.safetensors"))
    assert (shards[0], shards[-1]) == (SHARD, LAST)
    return root


def snapshot(root: pathlib.Path) -> list[tuple[str, int]]:
    """All files with their sizes, except the temporary folder of a resumable conversion."""
    return [(str(p), p.lstat().st_size) for p in sorted(root.rglob("*")) if ".partial" not in str(p)]


@pytest.mark.timeout(60)  # reading a pipe would block forever
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name.replace(" ", "_"))
def test_a_hostile_input_gets_one_message(hostile, good, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(good, root)
    hostile.change(root)
    before = snapshot(root)
    tracemalloc.start()
    code, _, err = run(hostile.command, root)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert code == (65 if hostile.name in DAMAGED else 2), err
    assert hostile.says in err
    assert err.startswith("zaya: convert: ")
    assert err.count("\n") == 1
    assert not (root / "out").exists()
    assert snapshot(root) == before
    assert peak < 50e6, "what a header claims must not be allocated"


def test_good_folders_convert(good, tmp_path):
    """Otherwise the table above would prove nothing."""
    root = tmp_path / "copy"
    shutil.copytree(good, root)
    for number, source in enumerate(("native", "whole", "legacy", "run")):
        assert run(f"{source} out{number}", root)[0] == 0


def test_a_damaged_journal_is_discarded(good, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(good, root)
    (root / "out.partial").mkdir()
    (root / "out.partial/journal").write_bytes(b"\xff\xfe\0\nx\n")
    code, _, err = run("native out", root)
    assert (code, err) == (0, "")


def test_inputs_have_unique_names():
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE)


def print_table() -> None:
    """Prints the inputs and their messages as Markdown."""
    print("| input | `zaya convert ...` | says |\n|---|---|---|")
    for hostile in HOSTILE:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            make_good(root)
            hostile.change(root)
            _, _, err = run(hostile.command, root)
            print(f"| {hostile.name} | `{hostile.command}` | {err.strip().removeprefix('zaya: convert: ')} |")


if __name__ == "__main__":
    print_table()
