"""The whole drill: every kind of fault in four processes, compared with an undisturbed run of equal length.

pytest -n 0 -s -m campaign tests/multiprocess/test_drill.py
"""

import json
import sys

import pytest
from groups import start_words

from zaya_jax.aegis.drill.campaign import KINDS
from zaya_jax.aegis.drill.command import RESULT_FILE

SECONDS = 4 * 3600


@pytest.mark.campaign
@pytest.mark.timeout(SECONDS)
def test_every_fault_is_noticed_and_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "drill"
    process = start_words([sys.executable, "-m", "zaya_jax.cli", "aegis", "drill", f"--folder={folder}"])
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()
    print(output)
    result = json.loads((folder / RESULT_FILE).read_text())
    assert result["exit_codes"] == [0, 0]
    assert result["false_alarms"] == []
    assert sorted(trial["kind"] for trial in result["trials"]) == sorted(KINDS)
    assert [trial["kind"] for trial in result["trials"] if not trial["noticed"]] == []
    assert result["all"]["named"] >= 0.95 * len(KINDS)
    assert [trial["kind"] for trial in result["trials"] if trial["equal"] is False] == []
    assert process.returncode == 0
