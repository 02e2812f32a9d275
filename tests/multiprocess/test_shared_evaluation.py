"""An evaluation by several processes and devices equals that of one device, bitwise."""

import json
import sys

import answered
import pytest
from groups import ROOT, finish, start_words
from small_runs import make_base, small_values

from zaya_jax import cli

LAUNCH = (
    "from zaya_jax.parallel.processes import launch as l; import sys; "
    "sys.exit(l.launch(l.Launch([sys.executable, *sys.argv[1:]], 2, 2)))"
)


@pytest.mark.campaign
def test_scores_and_texts_do_not_depend_on_the_devices(tmp_path):
    out = tmp_path / "out.json"
    with answered.all_devices() as workers:
        assert workers is not None
        alone = answered.ask(workers)
        with pytest.raises(ValueError, match="token 61 at position 0 of prompt 0 is outside") as caught:
            answered.ask_what_cannot_be(workers)
    program = str(ROOT / "tests/multiprocess/answered.py")
    code, output = finish(start_words([sys.executable, "-c", LAUNCH, program, str(out)]))
    shared = json.loads(out.read_text())
    assert alone.pop("devices") == [0]
    assert shared.pop("devices") == [0, 1, 0, 1]
    assert shared == json.loads(json.dumps(alone))
    assert len({text for texts in alone["texts"] for text in texts}) > 6
    assert code == 2
    (sentence,) = [line for line in output.splitlines() if str(caught.value) in line]
    assert sentence.startswith("process 1 on ")


def test_texts_are_evaluated_by_all_processes_and_printed_once(tmp_path):
    run, long, short = (tmp_path / name for name in ("run", "long.txt", "short.txt"))
    make_base(run, small_values(run_folder=str(run), corpus="none"))
    long.write_text("A text of some length.\n" * 60)
    short.write_text("é")
    words = ["eval", str(run), "--batch-size=2", "--text", str(long), str(short)]
    cli.main([*words, f"--json={tmp_path}/alone.json"])
    launch = [sys.executable, "-m", "zaya_jax.cli", "launch", "--processes=2", "--devices=2", "--"]
    code, output = finish(start_words([*launch, *words, f"--json={tmp_path}/shared.json"]))
    assert code == 0, output
    assert (tmp_path / "shared.json").read_text() == (tmp_path / "alone.json").read_text()
    assert output.count("contexts of 64 tokens, 4 devices of 2 processes") == 1
    assert output.count("in all") == 1
