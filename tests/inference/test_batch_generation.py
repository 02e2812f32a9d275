"""Files of prompts: each answer is that of its line alone, in order, and none is lost or made twice."""

import json

import numpy as np
import pytest
from small_runs import make_chat_run

from zaya_jax import cli
from zaya_jax.inference import batch_generation
from zaya_jax.inference.batch_generation import batches
from zaya_jax.inference.decoding import decode
from zaya_jax.inference.prompt_lines import PromptLine
from zaya_jax.inference.prompting import Prompt

LINES = [
    {"prompt": "def main(", "id": 7},
    {"prompt": "x", "max_new_tokens": 3, "label": ["kept", None, "é"]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]},
    {"prompt": "import os\nimport sys\n", "seed": 5},
    {"prompt": "def main(", "id": 8},
    {"prompt": "import os\nimport sys\n", "seed": 5},
    {"prompt": "yes " * 5, "max_new_tokens": 20},
]
NUM_NEW = 12


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches") / "run"
    make_chat_run(folder)
    return folder


def write_lines(file, lines):
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def answer(run_folder, file, *words, batch_size=3):
    output = file.with_suffix(".answers")
    options = ["--output", str(output), "--batch-size", str(batch_size), "--max-new-tokens", str(NUM_NEW)]
    cli.main(["generate", str(run_folder), "--input", str(file), *options, *words])
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def answers(run_folder, tmp_path_factory):
    file = write_lines(tmp_path_factory.mktemp("answers") / "prompts.jsonl", LINES)
    return answer(run_folder, file, "--logprobs")


def test_answers_are_in_order_and_repeat_their_lines(answers):
    added = {"text", "finish_reason", "num_prompt_tokens", "num_new_tokens", "tokens", "logprobs"}
    for line, found in zip(LINES, answers, strict=True):
        assert found == found | line
        assert found.keys() - line.keys() == added
        limit = line.get("max_new_tokens", NUM_NEW)
        assert len(found["tokens"]) == len(found["logprobs"]) == found["num_new_tokens"] <= limit
        ended = found["tokens"][-1] == (260 if "messages" in line else 1)
        assert found["finish_reason"] == ("stop" if ended else "length")
        assert ended or found["num_new_tokens"] == limit
        assert all(each < 0 for each in found["logprobs"])
    assert answers[1]["num_new_tokens"] == 3
    assert answers[0]["num_prompt_tokens"] == 10  # nine bytes behind a BOS


def test_a_text_is_of_its_line_and_not_of_the_others(answers, run_folder, tmp_path, capsys):
    """Alone, in another order and in batches of another size; two lines of one seed are alike, others not."""
    assert answers[3]["text"] == answers[5]["text"]
    assert answers[0]["text"] != answers[4]["text"]
    numbers = [6, 2, 3, 1]
    moved = [LINES[number] | {"seed": LINES[number].get("seed", number)} for number in numbers]
    found = answer(run_folder, write_lines(tmp_path / "moved.jsonl", moved), "--logprobs", batch_size=2)
    for number, each in zip(numbers, found, strict=True):
        assert each["text"] == answers[number]["text"]
        np.testing.assert_allclose(each["logprobs"], answers[number]["logprobs"], rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    words = ["--prompt", LINES[4]["prompt"], "--seed", "4", "--max-new-tokens", str(NUM_NEW)]
    cli.main(["generate", str(run_folder), *words])
    assert capsys.readouterr().out == f"{LINES[4]['prompt']}{answers[4]['text']}\n"


def test_stop_strings_and_greedy_texts(answers, run_folder, tmp_path):
    (whole,) = answer(run_folder, write_lines(tmp_path / "a.jsonl", LINES[:1]), "--temperature", "0")
    stop = whole["text"][4:6]
    file = write_lines(tmp_path / "b.jsonl", LINES[:1])
    (found,) = answer(run_folder, file, "--temperature", "0", "--stop", stop)
    assert found["text"] == whole["text"].partition(stop)[0]
    assert found["finish_reason"] == "stop"


class Killed(BaseException):
    """What no code of ours catches."""


def kill_after(num_batches, monkeypatch, complete=batch_generation.complete):
    """Lets so many batches be made; gives a list that grows with each."""
    made = []

    def until_killed(*arguments, **options):
        if len(made) == num_batches:
            raise Killed
        made.append(arguments)
        return complete(*arguments, **options)

    monkeypatch.setattr(batch_generation, "complete", until_killed)
    return made


def test_a_killed_process_loses_no_batch_and_makes_none_twice(
    answers, run_folder, tmp_path, monkeypatch, capsys
):
    """The lines above are three batches: each process makes one, and the second is cut while it writes."""
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    unfinished = tmp_path / "prompts.answers.unfinished"
    for _ in range(2):
        kill_after(1, monkeypatch)
        with pytest.raises(Killed):
            answer(run_folder, file, "--logprobs")
        assert not unfinished.with_suffix("").exists()
        with unfinished.open("ab") as torn:
            torn.write(b'{"line": 1, "answer": {"te')
    kept = len(unfinished.read_text().splitlines()) - 2  # behind the first line, before the torn one
    capsys.readouterr()
    with pytest.raises(SystemExit):
        answer(run_folder, file, "--logprobs", "--temperature", "0.5")
    assert "has answers to other prompts, or by other weights or options" in capsys.readouterr().err

    made = kill_after(9, monkeypatch)
    found = answer(run_folder, file, "--logprobs")
    assert capsys.readouterr().err == (
        f"{tmp_path}/prompts.answers: {kept} of {len(LINES)} answers are there already; "
        f"{len(LINES) - kept} are left\n"
    )
    assert len(made) == 1
    assert [each["text"] for each in found] == [each["text"] for each in answers]
    assert not unfinished.exists()
    with pytest.raises(SystemExit):
        answer(run_folder, file, "--logprobs")
    assert "prompts.answers is there already; remove it, or name another file" in capsys.readouterr().err


def test_batches_are_of_one_shape():
    def line(number, length, limit=4, end_id=1):
        return PromptLine(number, {}, Prompt([5] * length, end_id), limit, seed=0)

    lines = [
        line(1, 3),
        line(2, 40),
        line(3, 17),
        line(4, 30),
        line(5, 9, end_id=2),
        line(6, 16),
        line(7, 2, 60),
    ]
    found = [[each.number for each in batch] for batch in batches(lines, 2)]
    assert sorted(number for batch in found for number in batch) == [1, 2, 3, 4, 5, 6, 7]
    assert found[:2] == [[2], [7]]  # 64 + 4 tokens, and 16 + 60, need a longer cache than the others
    assert [6, 1] in found
    assert [4, 3] in found
    assert [5] in found


def test_lines_of_other_contents_take_no_other_program(run_folder, tmp_path):
    """Nor does a last batch that is not full."""
    answer(run_folder, write_lines(tmp_path / "a.jsonl", [{"prompt": "abc"}] * 5), batch_size=5)
    before = decode._cache_size()
    more = [{"prompt": "abcdefgh", "max_new_tokens": 5}, {"prompt": ""}, *[{"prompt": "z"}] * 7]
    answer(run_folder, write_lines(tmp_path / "b.jsonl", more), batch_size=5)
    assert decode._cache_size() == before


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a"', "is not JSON"),
        ("[1]", "holds a list; it must be a JSON object"),
        ('{"id": 1}', 'must have either "prompt" or "messages"; it has id'),
        (
            '{"prompt": "a", "messages": []}',
            'must have either "prompt" or "messages"; it has prompt, messages',
        ),
        ('{"prompt": 3}', "has a prompt that is a int; it must be text"),
        ('{"messages": []}', "has no messages"),
        ('{"messages": [{"role": "user"}]}', "message 1, has role; a message has role and content"),
        ('{"prompt": "a", "seed": -1}', "has seed -1; it must be a whole number from 0 to 4294967295"),
        (
            '{"prompt": "a", "max_new_tokens": true}',
            "has max_new_tokens True; it must be a whole number from 1",
        ),
        ('{"prompt": "a", "text": "b"}', 'has "text", where its answer stands later'),
        ('{"prompt": "a\\ud800"}', "has half a surrogate pair; it must be text"),
        (
            json.dumps({"prompt": "a" * 505}),
            "has 506 tokens and max_new_tokens 12; together they must not exceed",
        ),
    ],
)
def test_a_bad_line_is_named_before_anything_is_written(line, sentence, run_folder, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(SystemExit) as leaving:
        answer(run_folder, tmp_path / "bad.jsonl")
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"zaya: generate: {tmp_path}/bad.jsonl:3")
    assert sentence in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_file_without_lines(run_folder, tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(SystemExit):
        answer(run_folder, tmp_path / "none.jsonl")
    assert "none.jsonl has no line; it must have at least one" in capsys.readouterr().err
