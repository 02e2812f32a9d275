"""`zaya aegis verify`: runs that cannot answer, and the answer of one that does."""

import threading
import time

import pytest
from small_runs import prepare_run_folder, small_values

from zaya_jax.aegis.watch.verify_command import main, request_replay
from zaya_jax.config import Config
from zaya_jax.run_folder.events import write_event
from zaya_jax.run_folder.names import BEGAN, FINISHED, REPLAY_REQUEST_FILE, REPLAYED


def prepared(tmp_path, *, last=BEGAN, **watch):
    values = small_values(run_folder=str(tmp_path / "run"), corpus=str(tmp_path / "corpus"))
    prepare_run_folder(Config.from_dict(values | {"watch": watch}), overwrite=False)
    write_event(tmp_path / "run", last, step=3)
    return tmp_path / "run"


def test_a_run_without_states_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"watch\.replay=False and keeps no state"):
        request_replay(prepared(tmp_path), timeout=1.0)


def test_a_finished_run_is_refused(tmp_path):
    run = prepared(tmp_path, last=FINISHED, checksums=True, replay=True)
    with pytest.raises(ValueError, match="is not running"):
        request_replay(run, timeout=1.0)


def test_a_silent_run_has_a_time_limit(tmp_path):
    run = prepared(tmp_path, checksums=True, replay=True)
    with pytest.raises(ValueError, match=r"within 0\.1 s"):
        request_replay(run, timeout=0.1)
    assert not (run / REPLAY_REQUEST_FILE).exists()


@pytest.mark.parametrize(("result", "code"), [("equal", None), ("different", 76)])
def test_the_answer_decides_the_exit_code(tmp_path, capsys, result, code):
    run = prepared(tmp_path, checksums=True, replay=True)

    def answer():
        while not (run / REPLAY_REQUEST_FILE).exists():
            time.sleep(0.01)
        write_event(run, REPLAYED, step=4, reason="a step was not finite: repeated", result="equal")
        write_event(run, REPLAYED, step=5, reason=f"requested: {result}", result=result)

    threading.Thread(target=answer).start()
    if code is None:
        main([str(run)])
    else:
        with pytest.raises(SystemExit) as ended:
            main([str(run)])
        assert ended.value.code == code
    assert f"requested: {result}" in capsys.readouterr().out
