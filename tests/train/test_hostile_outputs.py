"""Foreign files where a run writes its metric files, and damaged rows in them."""

import json
import os

import pytest
from small_runs import small_config

from zaya_jax.train.metrics.files import MetricsWriter, read_metrics
from zaya_jax.train.run_folder_checks import check_folder

pytestmark = pytest.mark.timeout(60)  # opening a pipe would block forever


@pytest.fixture
def config(tmp_path):
    config = small_config(run_folder=tmp_path / "run", corpus=tmp_path / "corpus")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(config.to_text())
    return config


@pytest.mark.parametrize("name", ["metrics.jsonl", "routers.jsonl", "tensorboard"])
@pytest.mark.parametrize("what", ["the other kind", "pipe", "link", "link to nothing"])
def test_a_run_does_not_write_through_it(config, tmp_path, name, what):
    path, is_file = tmp_path / "run" / name, name.endswith("l")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "the other kind":
        path.mkdir() if is_file else path.touch()
    else:
        path.symlink_to(tmp_path / ("nothing" if "nothing" in what else "run/config.json" if is_file else ""))
    kind = "file" if is_file else "folder"
    with pytest.raises(
        ValueError, match=rf"{name} is not a {kind}, and the run writes its metrics there; move it a"
    ):
        check_folder(config, overwrite=False)
    check_folder(config, overwrite=True)  # which removes it


def test_damaged_lines_are_dropped_with_a_warning(tmp_path, caplog):
    """Other lines stay; an incomplete last line is not reported."""
    rows = [json.dumps({"step": step, "kind": "validation", "loss": 0.5}).encode() for step in (1, 2, 3)]
    damaged = [
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"step": "x", "kind": "train"}',
        b'{"step": 1}',
        b"[" * 10**5,
        b"null",
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([rows[0], *damaged, *rows[1:], b'{"step": 3, "ki']))
    assert [row["step"] for row in read_metrics(tmp_path, "validation")] == [1, 2, 3]
    with MetricsWriter(tmp_path, first_step=2):
        pass
    assert path.read_bytes() == rows[0] + b"\n" + rows[1] + b"\n"
    start, end = len(rows[0]) + 1, len(rows[0]) + len(b"\n".join(damaged))
    assert f"{path} is damaged: bytes {start} to {end}, between steps 1 and 2, are not rows" in caplog.text
    assert "the 3 whole rows around them stay" in caplog.text
    caplog.clear()
    path.write_bytes(rows[0] + b'\n{"step": 3, "ki')
    with MetricsWriter(tmp_path, first_step=2):
        pass
    assert path.read_bytes() == rows[0] + b"\n"
    assert not caplog.text
