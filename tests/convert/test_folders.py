"""Converted folders: Orbax reads them, runs start from them, and damage in them is detected."""

import dataclasses
import hashlib
import io
import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console
from small_runs import build_small_corpus, small_values
from small_runs import small_config as small_run
from small_weights import contents, plausible_variables, random_variables, small_config, tensors_in, zaya

import zaya_jax
from zaya_jax.checkpoint import Checkpoints, Retention, load_run
from zaya_jax.config import Config
from zaya_jax.convert import stream
from zaya_jax.convert.inspection import inspect
from zaya_jax.convert.pytorch.layouts import tensors_of, weight_slices
from zaya_jax.convert.run_weights import RunWeights
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer, HuggingFaceTokenizer


@pytest.fixture(name="native")
def fixture_native(tmp_path):
    config = small_config()
    variables = plausible_variables(config, 0)
    zaya_jax.save_pytorch(tmp_path / "native", zaya_jax.Zaya(config), variables, dtype="float32")
    return tmp_path / "native", variables


def run_of(folder, *, step=3):
    """Writes a run folder like training, with a checkpoint by Orbax."""
    config = small_run(run_folder=folder, corpus=folder)
    folder.mkdir()
    (folder / "config.json").write_text(config.to_text())
    variables = plausible_variables(config.model, 1)
    with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
        on_device = jax.tree.map(jax.device_put, variables)
        checkpoints.save(step, weights=on_device, training={"step": np.int32(step)})
    return config, variables


def test_the_table_has_all_eight_billion_parameters():
    """Tensors and parameters are those of the released files ([Weights], ZAYA1-8B's index)."""
    tensors = tensors_of("native", zaya_jax.ModelConfig())
    biases = sum(np.prod(tensor.shape) for tensor in tensors if tensor.name.endswith("balancing_biases"))
    assert len(tensors) == 1283
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) - biases == 8_840_488_784
    assert len(tensors_of("legacy", zaya_jax.ModelConfig())) == 1283 - 80 + 40 * 16 * 2
    # The largest part in memory: an expert, or some rows of the embedding.
    assert max(weight_slice.size for tensor in tensors for weight_slice in tensor.slices) * 4 <= 67_108_864


def test_plain_orbax_reads_what_we_write(native):
    folder, variables = native
    zaya(f"convert {folder} {folder.parent}/run")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder.parent.absolute() / "run/checkpoints/0/weights")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), restored, variables)


def test_we_read_what_orbax_writes(tmp_path):
    config, variables = run_of(tmp_path / "run")
    zaya(f"convert {tmp_path}/run {tmp_path}/native --verify")
    model, returned = zaya_jax.load_pytorch(tmp_path / "native")
    jax.tree.map(np.testing.assert_array_equal, returned, variables)
    assert model.config.layer_types == config.model.layer_types
    assert model.execution == zaya_jax.ExecutionConfig(dtype="float32")
    execution = zaya_jax.ExecutionConfig(remat="layer")
    assert zaya_jax.load_pytorch(tmp_path / "native", execution=execution)[0].execution == execution
    card = (tmp_path / "native/README.md").read_text()
    assert "Step 3 of a run" in card
    assert "Trained on 768 tokens" in card
    zaya(f"convert {tmp_path}/run {tmp_path}/copy --layout zaya --dtype bfloat16")
    copy = load_run(tmp_path / "copy")
    expected = dataclasses.replace(config, run_folder=str(tmp_path / "copy"))
    assert (copy.step, copy.config) == (3, expected)


def test_a_checkpoint_is_written_in_chunks(tmp_path):
    """A stack of layers in one chunk would have to fit in memory to be read."""
    config, variables = run_of(tmp_path / "run")
    largest = {}
    for weight_slice in weight_slices(config.model):
        largest[weight_slice.path] = max(4 * weight_slice.size, largest.get(weight_slice.path, 0))
    assert RunWeights(tmp_path / "run").chunk_bytes() == sum(largest.values())
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path / "run").variables, variables)


@pytest.fixture(name="imported")
def fixture_imported(tmp_path):
    """Returns a run folder converted from PyTorch weights, and options of a run of two steps that changes
    nothing.
    """
    build_small_corpus(tmp_path / "corpus")
    config = Config.from_dict(small_values(run_folder="none", corpus="none"))
    zaya_jax.save_pytorch(
        tmp_path / "native", zaya_jax.Zaya(config.model), plausible_variables(config.model, 5)
    )
    zaya(f"convert {tmp_path}/native {tmp_path}/run")
    fields = {
        "data.corpus": tmp_path / "corpus", "data.tokenizer": "byte", "data.batch_size": 4,
        "data.sequence_length": 64, "train.num_steps": 2, "train.sample_tokens": 0, "train.eval_sequences": 4,
        "optimizer.warmup_steps": 0, "optimizer.learning_rate": 1e-30, "optimizer.final_learning_rate": 0,
        "balancing.learning_rate": 0,
    }  # fmt: skip
    options = " ".join(f"--config.{name}={value}" for name, value in fields.items())
    return tmp_path / "run", f"train --config={tmp_path}/run/config.json {options}"


@pytest.mark.slow
def test_a_run_starts_from_converted_weights(imported, tmp_path):
    run, command = imported
    zaya(f"{command} --config.run_folder={tmp_path}/tuned --config.train.init_from={run}")
    before, after = load_run(run), load_run(tmp_path / "tuned")
    assert (before.step, after.step) == (0, 2)
    for given, now in zip(*(jax.tree.leaves(saved.variables) for saved in (before, after)), strict=True):
        assert now.dtype == np.float32
        np.testing.assert_array_equal(given, now)  # a learning rate of zero leaves the weights as they are


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--config.train.init_from={root}/native", "is not the config of a run"),
        (
            "--config.train.init_from={root}/run --config.model.hidden_size=48",
            "must have weights of the same names and shapes",
        ),
        (
            "--config.train.init_from={root}/run --config.model.lm_head_bias=True",
            "must have weights of the same names and shapes",
        ),
    ],
)
def test_weights_that_a_run_cannot_start_from(imported, tmp_path, capsys, options, sentence):
    _, command = imported
    with pytest.raises(SystemExit, match="2"):
        zaya(f"{command} --config.run_folder={tmp_path}/other {options.format(root=tmp_path)}")
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_weights_alone_cannot_be_resumed(imported, capsys):
    run, _ = imported
    values = json.loads((run / "config.json").read_text())
    corpus = str(run.with_name("corpus"))
    values["data"] |= {"corpus": corpus, "tokenizer": "byte", "batch_size": 4, "sequence_length": 64}
    (run / "config.json").write_text(json.dumps(values))
    with pytest.raises(SystemExit, match="2"):
        zaya(f"train --config={run}/config.json")
    assert "contains weights only; to train from" in capsys.readouterr().err


def test_tokenizer_files_are_copied(tmp_path):
    model = zaya_jax.Zaya(small_config(vocab_size=259))
    variables = random_variables(model.config, 0)
    zaya_jax.save_pytorch(tmp_path / "a", model, variables, tokenizer="byte")
    (tmp_path / "a/chat_template.jinja").write_text("{{ messages }}")
    zaya(f"convert {tmp_path}/a {tmp_path}/run")
    zaya(f"convert {tmp_path}/run {tmp_path}/b")
    zaya(f"convert {tmp_path}/b {tmp_path}/c --layout legacy")
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    for folder in ("run/tokenizer", "b", "c"):
        for name in names:
            assert (tmp_path / folder / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert json.loads((tmp_path / "b/config.json").read_text())["eos_token_id"] == 1
    tokenizer = HuggingFaceTokenizer(load_run(tmp_path / "run").config.data.tokenizer)
    assert tokenizer.encode("é\n") == ByteTokenizer().encode("é\n")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 1, 0)


def test_an_interrupted_conversion_resumes(native, monkeypatch, capsys):
    """The disk fails in the middle. Finished files are kept unless they were changed since."""
    folder, _ = native
    target = folder.parent / "run"
    zaya(f"convert {folder} {folder.parent}/whole")
    commit, calls = stream.commit_file, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 30:
            arguments[0].close()
            raise OSError(28, "No space left on device")
        commit(*arguments)

    monkeypatch.setattr(stream, "commit_file", fail)
    with pytest.raises(SystemExit, match="2"):
        zaya(f"convert {folder} {target}")
    assert "No space left on device; run the same command again to resume" in capsys.readouterr().err
    assert not target.exists()
    monkeypatch.setattr(stream, "commit_file", commit)
    journal = (target.with_name("run.partial") / "journal").read_text().splitlines()
    touched = target.with_name("run.partial") / "content" / journal[-1].split("  ")[1]
    touched.write_bytes(b"x" * touched.stat().st_size)
    with (target.with_name("run.partial") / "journal").open("a") as stream_:
        stream_.write("a line that a crash cut sho")
    zaya(f"convert {folder} {target}")
    assert "by an earlier attempt" in capsys.readouterr().out
    written = contents(target, without=("config.json", "SHA256SUMS"))
    assert written == contents(folder.parent / "whole", without=("config.json", "SHA256SUMS"))
    assert stream.check_checksums(target) is None
    assert not target.with_name("run.partial").exists()


def test_another_conversion_does_not_resume(native, monkeypatch, capsys):
    """The journal of a conversion to float32 is not used by one to bfloat16."""
    folder, _ = native
    target = folder.parent / "run"
    commit, calls = stream.commit_file, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 60:
            arguments[0].close()
            raise KeyboardInterrupt
        commit(*arguments)

    monkeypatch.setattr(stream, "commit_file", fail)
    with pytest.raises(SystemExit, match="130"):
        zaya(f"convert {folder} {target}")
    monkeypatch.setattr(stream, "commit_file", commit)
    zaya(f"convert {folder} {target} --dtype bfloat16 --layout legacy --verify")
    assert not [path for path in target.iterdir() if path.is_dir()], "folders of the other plan"
    shown = capsys.readouterr().out
    assert "by an earlier attempt" not in shown
    assert "of the largest, by narrower weights" in shown


def test_two_conversions_do_not_share_a_target(native, capsys):
    folder, _ = native
    aside = folder.parent / "run.partial"
    aside.mkdir()
    with stream.lock_folder(aside), pytest.raises(SystemExit, match="2"):
        zaya(f"convert {folder} {folder.parent}/run")
    assert "another conversion is writing" in capsys.readouterr().err


def test_a_full_disk_is_detected_before_the_conversion(native, monkeypatch, capsys):
    folder, _ = native
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SystemExit, match="2"):
        zaya(f"convert {folder} {folder.parent}/run")
    assert "has 1,000 free bytes" in capsys.readouterr().err


def test_overwrite_replaces_the_folder(native):
    folder, _ = native
    zaya(f"convert {folder} {folder.parent}/run")
    zaya(f"convert {folder} {folder.parent}/run --overwrite --layout legacy")
    assert tensors_in(folder.parent / "run").keys() == {t.name for t in tensors_of("legacy", small_config())}
    assert not [path for path in (folder.parent / "run").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["native", "run"]


def test_no_file_of_a_replaced_folder_survives(native, monkeypatch):
    """Killed between publishing the new folder and removing the old one, then run again."""
    folder, _ = native
    target = folder.parent / "run"
    zaya(f"convert {folder} {target}")
    command = f"convert {folder} {target} --overwrite --layout legacy"
    publish = stream.durable.publish

    def killed(*arguments, **options):
        publish(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(stream.durable, "publish", killed)
    with pytest.raises(SystemExit, match="130"):
        zaya(command)
    monkeypatch.setattr(stream.durable, "publish", publish)
    made = contents(target)
    assert (folder.parent / "run.partial/content/checkpoints").is_dir()
    zaya(command)
    assert contents(target) == made
    assert not [path for path in target.iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["native", "run"]


def flip(file: pathlib.Path, where: int = -1) -> None:
    raw = bytearray(file.read_bytes())
    raw[where] ^= 1
    file.write_bytes(bytes(raw))


def test_verify_finds_one_flipped_bit(native, capsys):
    """Orbax restores a flipped bit without an error, because it stores no checksums."""
    folder, _ = native
    target = folder.parent / "run"
    zaya(f"convert {folder} {target} --verify")
    shown = capsys.readouterr().out
    assert "values are bitwise equal, and all files match their checksums" in shown
    assert "tokens: bitwise equal" in shown
    part = target / "checkpoints/0/weights/params.layers.experts.down_proj/1.2.0.0"
    flip(part)
    with pytest.raises(SystemExit, match="65"):
        zaya(f"convert {folder} {target} --verify")
    assert "down_proj/1.2.0.0 is not as it was written: its checksum differs" in capsys.readouterr().err
    sums = target / "SHA256SUMS"
    name = str(part.relative_to(target))
    lines = [line for line in sums.read_text().splitlines() if not line.endswith(name)]
    lines.append(f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {name}")
    sums.write_text("\n".join(lines) + "\n")  # as if it had been converted wrongly
    with pytest.raises(SystemExit, match="2"):
        zaya(f"convert {folder} {target} --verify")
    says = "layers/experts/down_proj of layer or row 1, expert 2: 1 of 240 values differ"
    assert says in capsys.readouterr().err


GIVEN = "0" * 64


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda lines: [], "SHA256SUMS has '' in line 1; it must be a SHA-256 sum and another file's name"),
        (lambda lines: ["", *lines], "SHA256SUMS has '' in line 1"),
        (lambda lines: [*lines, "rubbish"], "SHA256SUMS has 'rubbish' in line"),
        (lambda lines: [*lines, lines[0]], "another file's name"),
        (lambda lines: [*lines, f"{GIVEN}  ../native/config.json"], "config.json' in line"),
        (
            lambda lines: [*lines, f"{GIVEN}  more.safetensors"],
            "more.safetensors is missing; SHA256SUMS lists it",
        ),
        (lambda lines: lines[:1], " is not in SHA256SUMS; it was added later"),
        (
            lambda lines: [f"{GIVEN}{lines[0][64:]}", *lines[1:]],
            "not as it was written: its checksum differs",
        ),
        (lambda lines: [*lines, f"{GIVEN}  \udcff"], " is missing; SHA256SUMS lists it"),
    ],
)
@pytest.mark.parametrize("layout", ["zaya", "legacy"])
def test_checksums_are_compared_with_all_files(native, change, sentence, layout, capsys):
    folder, _ = native
    target = folder.parent / "target"
    zaya(f"convert {folder} {target} --layout {layout}")
    sums = target / "SHA256SUMS"
    lines = change(sums.read_text().splitlines())
    sums.write_bytes("".join(line + "\n" for line in lines).encode(errors="surrogateescape"))
    (target / "notes.txt").write_text("a file that users added is not a weight")
    with pytest.raises(SystemExit, match="65"):
        zaya(f"convert {folder} {target} --verify")
    output = capsys.readouterr().err
    assert sentence in output
    assert output.count("\n") == 1


def test_other_files_in_the_folder_do_not_matter(native, capsys):
    folder, _ = native
    zaya(f"convert {folder} {folder.parent}/run")
    (folder.parent / "run/notes.txt").write_text("mine")
    zaya(f"convert {folder} {folder.parent}/run --verify")
    assert "all files match their checksums" in capsys.readouterr().out
    (folder.parent / "run/checkpoints/0/weights/params.embedding.table/9.9").write_text("")
    with pytest.raises(SystemExit, match="65"):
        zaya(f"convert {folder} {folder.parent}/run --verify")
    assert "params.embedding.table" in capsys.readouterr().err


def test_several_end_tokens_are_copied(native):
    """As in transformers: a list for EOS, null for a token that does not exist."""
    folder, _ = native
    values = json.loads((folder / "config.json").read_text())
    values |= {"eos_token_id": [1, 69], "bos_token_id": None, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(values))
    zaya(f"convert {folder} {folder.parent}/legacy --layout legacy")
    again = json.loads((folder.parent / "legacy/config.json").read_text())
    assert [again[f"{name}_token_id"] for name in ("eos", "bos", "pad")] == [[1, 69], None, 0]


def test_special_tokens_in_a_run_folder_are_validated(tmp_path, capsys):
    model = zaya_jax.Zaya(small_config(vocab_size=259))
    zaya_jax.save_pytorch(tmp_path / "a", model, random_variables(model.config, 0), tokenizer="byte")
    zaya(f"convert {tmp_path}/a {tmp_path}/run")
    (tmp_path / "run/tokenizer/generation_config.json").write_text('{"eos_token_id": 259}')
    with pytest.raises(SystemExit, match="2"):
        zaya(f"convert {tmp_path}/run {tmp_path}/out")
    assert "tokenizer/generation_config.json: eos_token_id has 259; it must be" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_replaced_by_its_own_conversion(tmp_path, capsys):
    """The tokenizer of the run is in the folder that its initial weights came from."""
    model = zaya_jax.Zaya(small_config(vocab_size=259))
    zaya_jax.save_pytorch(tmp_path / "a", model, random_variables(model.config, 0), tokenizer="byte")
    zaya(f"convert {tmp_path}/a {tmp_path}/first")
    zaya(f"convert {tmp_path}/first {tmp_path}/second --layout zaya")  # like a run that started there
    before = contents(tmp_path / "first")
    (tmp_path / "first/inner").symlink_to(tmp_path / "a")
    for source in ("second", "first/inner", "first/checkpoints"):
        with pytest.raises(SystemExit, match="2"):
            zaya(f"convert {tmp_path}/{source} {tmp_path}/first --overwrite")
    output = capsys.readouterr().err.splitlines()
    assert output[0].endswith(
        f"{tmp_path}/first/tokenizer/tokenizer.json is inside {tmp_path}/first, which would be replaced; "
        "choose another folder"
    )
    assert f"{tmp_path}/first/inner is inside {tmp_path}/first" in output[1]
    (tmp_path / "first/inner").unlink()
    assert contents(tmp_path / "first") == before


def test_inspecting_both_kinds_of_folders(native):
    folder, _ = native
    zaya(f"convert {folder} {folder.parent}/run --dtype bfloat16")

    def shown(path: pathlib.Path) -> str:
        console = Console(file=io.StringIO(), width=160)
        inspect(str(path), console)
        return console.file.getvalue()

    table = shown(folder)
    assert "native layout" in table
    row = next(line for line in table.splitlines() if "model.layers.*.mlp.experts.gate_up_proj" in line)
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["3", "3 x 24 x 20", "F32", "4,320"]
    table = shown(folder.parent / "run")
    assert "zaya layout" in table
    assert "bfloat16" in table
    assert "unreachable for all tokens" in table
