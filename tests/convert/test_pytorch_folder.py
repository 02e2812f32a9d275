"""Folders of weights from other tools: ignored fields and files are reported, and no file outside is read."""

import contextlib
import io
import json
import os
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from small_weights import join, random_variables, small_config, split

import zaya_jax
from zaya_jax import cli
from zaya_jax.convert.nonfinite import count_nonfinite
from zaya_jax.convert.pytorch.folder import open_folder
from zaya_jax.convert.pytorch.safetensors_file import read_header

SHARD, INDEX, WHOLE = "model-00001-of-00004.safetensors", "model.safetensors.index.json", "model.safetensors"
NETWORK = small_config(num_hidden_layers=2)


@pytest.fixture(scope="module", name="good")
def fixture_good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    variables = random_variables(NETWORK, 0, "bfloat16")
    zaya_jax.save_pytorch(root / "shards", zaya_jax.Zaya(NETWORK), variables, max_shard_bytes=8000)
    zaya_jax.save_pytorch(root / "whole", zaya_jax.Zaya(NETWORK), variables)
    return root


@pytest.fixture(name="root")
def fixture_root(good, tmp_path):
    shutil.copytree(good, tmp_path / "copy")
    return tmp_path / "copy"


def convert(*words: str | pathlib.Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `zaya convert`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(["convert", *map(str, words)])
        except SystemExit as leaving:
            return int(leaving.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
)
NOT_WEIGHTS = {
    "pointer": (POINTER, "a Git LFS pointer"),
    "page": (b"<!doctype html><html><head><title>Sign in</title></head></html>", "a web page (HTML)"),
    "page with a mark": (b"\xef\xbb\xbf\r\n<!DOCTYPE HTML PUBLIC '-//W3C//DTD HTML 4.01//EN'>", "a web page"),
    "storage": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML document"),
    "answer": (b'{"error":"Repository not found"}', "the error message of a server"),
    "sentence": (b"Invalid username or password.", "the error message of a server; log in"),
    "torch": (b"PK\x03\x04" + bytes(100), "a ZIP archive, as torch.save writes"),
    "pickle": (b"\x80\x02}q\x00." + bytes(100), "a pickle; loading it would run the code"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(100), "a GGUF file"),
    "gzip": (b"\x1f\x8b\x08\0\0\0\0\0\0\0" + bytes(100), "compressed with gzip"),
}


@pytest.mark.parametrize("file", ["shards/" + SHARD, "whole/" + WHOLE])
@pytest.mark.parametrize("name", NOT_WEIGHTS)
def test_folders_without_weights_are_named(root, name, file):
    content, what = NOT_WEIGHTS[name]
    (root / file).write_bytes(content)
    code, _, err = convert(root / file.split("/")[0], root / "out")
    assert code == 2
    assert f"{file} is not a safetensors file: it is {what}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("length", [0x8B1F, 0x0280])
def test_a_header_length_that_resembles_another_format(root, length):
    """A header of 640 bytes starts like a pickle, one of 35,615 like gzip."""
    file = root / "whole" / WHOLE
    head, data = split(file)
    names = [name for name in head if name != "__metadata__"][:2]
    new = {name: head[name] for name in names}
    size = head[names[-1]]["data_offsets"][1]
    text = json.dumps(new).encode()
    text += b" " * (length - len(text))
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[:size])
    assert [*read_header(file)] == names


def test_huge_shapes_take_no_time(tmp_path):
    entry = {"dtype": "F32", "shape": [2**62] * 200_000, "data_offsets": [0, 4]}
    (tmp_path / WHOLE).write_bytes(join({"a": entry}, bytes(4)))
    with pytest.raises(ValueError, match="tensor a has 200,000 axes; at most 64 are supported"):
        read_header(tmp_path / WHOLE)
    (tmp_path / WHOLE).write_bytes(join({"a": entry | {"shape": [10**4000] * 9}}, bytes(4)))
    with pytest.raises(ValueError, match=r"tensor a has shape \[1000.*it must be a list of integers"):
        read_header(tmp_path / WHOLE)


def test_a_stray_file_next_to_an_index(root):
    """transformers loads model.safetensors if both exist; other files are only reported."""
    shutil.copy(root / "whole" / WHOLE, root / "shards" / "consolidated.safetensors")
    code, out, _ = convert(root / "shards", root / "out")
    assert code == 0
    assert "note: " in out
    assert "shards: consolidated.safetensors" in out
    shutil.copy(root / "whole" / WHOLE, root / "shards" / WHOLE)
    code, _, err = convert(root / "shards", root / "out2")
    assert code == 2
    assert f"has {WHOLE}, and {INDEX} does not list it" in err


# Pipes and links

COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "special_tokens_map.json", "chat_template.jinja", "tokenizer.model")  # fmt: skip


@pytest.mark.timeout(60)  # reading a pipe would block forever
@pytest.mark.parametrize("name", ["shards/" + SHARD, "whole/" + WHOLE, "shards/" + INDEX, *COPIED])
def test_a_pipe_is_rejected(root, name):
    path = root / (name if "/" in name else f"whole/{name}")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    code, _, err = convert(path.parent, root / "out")
    assert code == 2
    assert f"{path} is a pipe; it must be a regular file" in err
    assert not (root / "out").exists()


@pytest.mark.parametrize("name", [WHOLE, *COPIED])
@pytest.mark.parametrize("way", ["absolute", "relative", "twice", "through a folder"])
def test_a_link_to_a_file_outside_is_rejected(root, name, way):
    secret, path = root / "secret", root / "whole" / name
    secret.write_text('{"secret": 1}')
    path.unlink(missing_ok=True)
    if way == "through a folder":
        (root / "whole" / "sub").symlink_to(root)
    elif way == "twice":
        (root / "whole" / "between").symlink_to(secret)
    targets = {
        "absolute": secret,
        "relative": "../secret",
        "twice": "between",
        "through a folder": "sub/secret",
    }
    path.symlink_to(targets[way])
    code, _, err = convert(root / "whole", root / "out", "--layout", "legacy")
    assert code == 2
    assert f"{path} is a link to {secret}, which is outside" in err
    assert not (root / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.model", "config.json", "generation_config.json"])
def test_a_link_out_of_a_run_is_rejected(root, name):
    assert convert(root / "whole", root / "run")[0] == 0
    (root / "secret").write_text("{}")
    path = root / "run" / (name if name == "config.json" else f"tokenizer/{name}")
    path.unlink(missing_ok=True)
    path.symlink_to(root / "secret")
    code, _, err = convert(root / "run", root / "out")
    assert code == 2
    assert "which is outside" in err


def test_rejected_links_and_folders_are_described(root):
    (root / "whole/tokenizer.json").symlink_to("nowhere")
    assert "tokenizer.json is a link to nothing" in convert(root / "whole", root / "out")[2]
    (root / "whole/tokenizer.json").unlink()
    (root / "whole/tokenizer.json").mkdir()
    assert "tokenizer.json is a folder; it must be a regular file" in convert(root / "whole", root / "out")[2]


def as_in_the_cache(root: pathlib.Path, folder: pathlib.Path, *, inner: str = "") -> pathlib.Path:
    """Returns a folder in the layout of huggingface_hub: REPOSITORY/snapshots/COMMIT with links to
    REPOSITORY/blobs.
    """
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc" / inner
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("inner", ["", "inner"])
def test_the_cache_of_the_hub_is_read(root, inner):
    snapshot = as_in_the_cache(root, root / "shards", inner=inner)
    (root / "linked").symlink_to(snapshot)
    for number, folder in enumerate((snapshot, root / "linked")):
        code, _, err = convert(folder, root / f"out{number}", "--layout", "legacy")
        assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "target", ["../../../models--org--other/blobs/0", "../../refs/main", "../other/config.json"]
)
def test_other_links_out_of_the_cache_of_the_hub_are_rejected(root, target):
    snapshot = as_in_the_cache(root, root / "shards")
    (snapshot / "tokenizer.model").symlink_to(target)
    place = snapshot / target
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("secret")
    code, _, err = convert(snapshot, root / "out")
    assert code == 2
    assert "which is outside" in err


def test_blobs_that_link_elsewhere_are_outside(root):
    snapshot = as_in_the_cache(root, root / "shards")
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(root / "elsewhere")
    blobs.symlink_to(root / "elsewhere")
    assert "which is outside" in convert(snapshot, root / "out")[2]


# Values and types


def change(file: pathlib.Path, name: str, edit) -> None:
    """Edits the values of a bfloat16 tensor in place."""
    head, data = split(file)
    begin, end = head[name]["data_offsets"]
    values = np.frombuffer(data[begin:end], ml_dtypes.bfloat16).copy()
    edit(values)
    file.write_bytes(join(head, data[:begin] + values.tobytes() + data[end:]))


NORM, EXPERTS = "model.norm.weight", "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("value", "layout"),
    [(np.nan, "legacy"), (-np.nan, "native"), (np.inf, "legacy"), (-np.inf, "native"), (np.nan, "zaya")],
)
def test_values_that_are_not_finite_are_reported(root, value, layout):
    def edit(values):
        values[[3, 5]] = value

    change(root / "whole" / WHOLE, NORM, edit)
    change(root / "whole" / WHOLE, EXPERTS, lambda values: values.fill(value))
    code, out, _ = convert(root / "whole", root / "out", "--layout", layout)
    number = NETWORK.num_experts * NETWORK.moe_intermediate_size * NETWORK.hidden_size
    assert code == 0
    assert (
        f"note: {number + 2:,} values are NaN or infinite: layers/experts/down_proj ({number:,}), "
        "final_norm/scale (2)\n" in out
    )


def test_values_that_overflow_in_a_narrower_type_are_reported(root):
    change(root / "whole" / WHOLE, NORM, lambda values: values.fill(1e5))
    assert "NaN" not in convert(root / "whole", root / "out", "--layout", "native")[1]
    out = convert(root / "whole", root / "out2", "--layout", "native", "--dtype", "float16")[1]
    assert f"{NETWORK.hidden_size} values are NaN or infinite: final_norm/scale" in out


def test_finite_weights_of_one_type_are_not_reported(root):
    assert "note" not in convert(root / "whole", root / "out", "--layout", "native")[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_counts_equal_those_of_numpy(dtype):
    """All 16-bit patterns, and as many random float32 ones."""
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)
    bits = (
        rng.integers(0, 2**32, 2**16, np.uint32) if kind.itemsize == 4 else np.arange(2**16, dtype=np.uint16)
    )
    values = bits.view(kind)
    expected = int((~np.isfinite(values.astype(np.float32))).sum())
    assert count_nonfinite(values) == expected > 0
    assert count_nonfinite(values[np.isfinite(values.astype(np.float32))]) == 0
    assert count_nonfinite(values[:0]) == 0


def test_mixed_types_are_reported(root):
    file = root / "whole" / WHOLE
    head, data = split(file)
    begin, end = head[NORM]["data_offsets"]
    wide = np.frombuffer(data[begin:end], ml_dtypes.bfloat16).astype(np.float32).tobytes()
    head[NORM] |= {"dtype": "F32"}
    grown = len(wide) - (end - begin)
    for name, entry in head.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [place + grown for place in entry["data_offsets"]]
    head[NORM]["data_offsets"] = [begin, begin + len(wide)]
    file.write_bytes(join(head, data[:begin] + wide + data[end:]))
    code, out, _ = convert(root / "whole", root / "out", "--layout", "native")
    assert code == 0
    assert f"note: the weights have several types: 1 tensors of F32 (such as {NORM})" in out
    assert "several types" in convert("inspect", root / "whole")[1]


# Fields of config.json that are not read


def with_fields(root: pathlib.Path, **fields) -> None:
    file = root / "whole/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_ignored_fields_are_reported(root):
    with_fields(root, trained_by="somebody", training_steps=3, use_sparkle=False, unsloth_version="2026.1")
    code, out, _ = convert(root / "whole", root / "out")
    assert code == 0
    assert "config.json has fields that are ignored: trained_by = 'somebody', training_steps = 3\n" in out
    with pytest.warns(UserWarning, match="trained_by = 'somebody'"):
        zaya_jax.load_pytorch(root / "whole")


def test_fields_that_change_the_network_are_rejected(root):
    with_fields(root, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    code, _, err = convert(root / "whole", root / "out")
    assert code == 2
    assert "config.json: rope_scaling is {'rope_type': 'yarn', 'factor': 4.0}; only unscaled rotary" in err
    with pytest.raises(ValueError, match="rope_scaling"):
        open_folder(root / "whole")
