"""Files of prompts: each answer depends on its line only, in order, and none is lost or repeated."""

import json
import shutil

import numpy as np
import pytest
from small_runs import make_chat_run

from zaya_jax import cli
from zaya_jax.inference import line_texts, prompting
from zaya_jax.inference.answer_files import UNFINISHED, AnswerFile
from zaya_jax.inference.engine.decoder import decode_steps, prefill_chunk

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
    for line, actual in zip(LINES, answers, strict=True):
        assert actual == actual | line
        assert actual.keys() - line.keys() == added
        limit = line.get("max_new_tokens", NUM_NEW)
        assert len(actual["tokens"]) == len(actual["logprobs"]) == actual["num_new_tokens"] <= limit
        ended = actual["tokens"][-1] == (260 if "messages" in line else 1)
        assert actual["finish_reason"] == ("stop" if ended else "length")
        assert ended or actual["num_new_tokens"] == limit
        assert all(each < 0 for each in actual["logprobs"])
    assert answers[1]["num_new_tokens"] == 3
    assert answers[0]["num_prompt_tokens"] == 10  # nine bytes after a BOS


def test_texts_do_not_depend_on_other_lines(answers, run_folder, tmp_path, capsys):
    """A line alone, in another order and in other batch sizes; lines with equal seeds are equal, others
    differ.
    """
    assert answers[3]["text"] == answers[5]["text"]
    assert answers[0]["text"] != answers[4]["text"]
    numbers = [6, 2, 3, 1]
    moved = [LINES[number] | {"seed": LINES[number].get("seed", number)} for number in numbers]
    actual = answer(run_folder, write_lines(tmp_path / "moved.jsonl", moved), "--logprobs", batch_size=2)
    for number, each in zip(numbers, actual, strict=True):
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
    (actual,) = answer(run_folder, file, "--temperature", "0", "--stop", stop)
    assert actual["text"] == whole["text"].partition(stop)[0]
    assert actual["finish_reason"] == "stop"


class Killed(BaseException):
    """An exception that our code does not catch."""


def kill_after(num_writes, monkeypatch, add=AnswerFile.add):
    """Allows a number of writes of answers; returns a list that grows with the lines of each of them."""
    written = []

    def until_killed(self, answers):
        if len(written) == num_writes:
            raise Killed
        written.append([*answers])
        add(self, answers)

    monkeypatch.setattr(AnswerFile, "add", until_killed)
    return written


def test_answers_of_a_schema(answers, run_folder, tmp_path):
    (tmp_path / "schema.json").write_text('{"enum": [41, 42]}')
    file = write_lines(tmp_path / "schema.jsonl", LINES)
    found = answer(run_folder, file, "--json-schema", str(tmp_path / "schema.json"))
    for line, each in zip(LINES, found, strict=True):
        # A chat may begin with a thought, which may last until the limit.
        if "prompt" in line:
            assert each["text"] in ("41", "42")
            assert each["finish_reason"] == "stop"
            assert each["num_new_tokens"] == 3
        else:
            assert each["finish_reason"] == "length" or each["text"].endswith(("41", "42"))


def test_a_killed_process_loses_and_repeats_no_answer(answers, run_folder, tmp_path, monkeypatch, capsys):
    """Each process writes once, with answers that became complete together, and is killed as it continues."""
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    unfinished = tmp_path / "prompts.answers.unfinished"
    kept = []
    for _ in range(2):
        written = kill_after(1, monkeypatch)
        with pytest.raises(Killed):
            answer(run_folder, file, "--logprobs")
        kept += written[0]
        assert not unfinished.with_suffix("").exists()
        with unfinished.open("ab") as torn:
            torn.write(b'{"line": 1, "answer": {"te')
    # After the first line, and without the incomplete one.
    lines = [json.loads(line)["line"] for line in unfinished.read_text().splitlines()[1:-1]]
    assert lines == kept
    capsys.readouterr()
    with pytest.raises(SystemExit):
        answer(run_folder, file, "--logprobs", "--temperature", "0.5")
    assert "has answers to other prompts, or by other weights or options" in capsys.readouterr().err

    written = kill_after(9, monkeypatch)
    actual = answer(run_folder, file, "--logprobs")
    assert capsys.readouterr().err == (
        f"{tmp_path}/prompts.answers: {len(kept)} of {len(LINES)} answers exist already; "
        f"{len(LINES) - len(kept)} are left\n"
    )
    assert sorted(sum(written, kept)) == list(range(1, len(LINES) + 1))
    assert actual == answers
    assert not unfinished.exists()
    with pytest.raises(SystemExit):
        answer(run_folder, file, "--logprobs")
    assert "prompts.answers exists already; remove it, or name another file" in capsys.readouterr().err


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def typed_run(request, run_folder, tmp_path_factory):
    """Returns the results of the run with another dtype of products."""
    folder = tmp_path_factory.mktemp("typed") / request.param
    shutil.copytree(run_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["execution"]["dtype"] = request.param
    (folder / "config.json").write_text(json.dumps(config))
    run = prompting.load_for_generation(str(folder))
    assert run.variables["params"]["layers"]["experts"]["down_proj"].dtype == request.param
    return run


def test_a_file_resumed_after_any_line_is_bitwise_equal(typed_run, tmp_path, monkeypatch):
    """Log-probabilities too: a lost line is computed again in its original group, here of three lines."""
    monkeypatch.setattr(prompting, "load_for_generation", lambda *_: typed_run)
    monkeypatch.setattr(line_texts, "LINES_PER_SLOT", 1)
    file = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x" * n} for n in range(17, 24)])
    output, unfinished = file.with_suffix(".answers"), file.with_suffix(".answers" + UNFINISHED)
    kept, finish = [], AnswerFile.finish

    def finish_and_copy(self, numbers):
        kept.append(unfinished.read_bytes())
        finish(self, numbers)

    monkeypatch.setattr(AnswerFile, "finish", finish_and_copy)
    answer(typed_run.folder, file, "--logprobs")
    expected = output.read_bytes()
    head, *rows = kept[0].splitlines(keepends=True)
    assert len(rows) == 7
    for number in range(len(rows) + 1):
        output.unlink()
        torn = rows[number][:20] if number < len(rows) else b""
        unfinished.write_bytes(b"".join([head, *rows[:number], torn]))
        answer(typed_run.folder, file, "--logprobs")
        assert output.read_bytes() == expected, f"resumed after {number} lines"


@pytest.mark.parametrize("words", [["--max-new-tokens", "5"], ["--seed", "3"], ["--top-k", "4"]])
def test_another_command_does_not_resume(words, answers, run_folder, tmp_path, monkeypatch, capsys):
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    kill_after(1, monkeypatch)
    with pytest.raises(Killed):
        answer(run_folder, file)
    with pytest.raises(SystemExit):
        answer(run_folder, file, *words)
    assert "has answers to other prompts" in capsys.readouterr().err


def test_another_batch_size_does_not_resume(answers, run_folder, tmp_path, monkeypatch, capsys):
    file = write_lines(tmp_path / "prompts.jsonl", LINES)
    kill_after(1, monkeypatch)
    with pytest.raises(Killed):
        answer(run_folder, file)
    with pytest.raises(SystemExit):
        answer(run_folder, file, batch_size=2)
    assert "(including the batch size)" in capsys.readouterr().err


def test_other_lines_compile_nothing(run_folder, tmp_path):
    """Other lengths and numbers of lines run the same programs."""
    lines = [{"prompt": "abc", "max_new_tokens": 3 * number} for number in range(1, 6)]
    answer(run_folder, write_lines(tmp_path / "a.jsonl", lines))
    programs = prefill_chunk, decode_steps
    before = [each._cache_size() for each in programs]
    more = [{"prompt": "abcdefgh" * 9, "max_new_tokens": 5}, {"prompt": ""}, *[{"prompt": "z"}] * 7]
    answer(run_folder, write_lines(tmp_path / "b.jsonl", more))
    assert [each._cache_size() for each in programs] == before


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
        ('{"prompt": "a", "seed": -1}', "has seed -1; it must be an integer from 0 to 4294967295"),
        (
            '{"prompt": "a", "max_new_tokens": true}',
            "has max_new_tokens True; it must be an integer from 1",
        ),
        ('{"prompt": "a", "text": "b"}', 'has "text", which the answer adds'),
        ('{"prompt": "a\\ud800"}', "has half a surrogate pair, which is not text"),
        (
            json.dumps({"prompt": "a" * 505}),
            "has 506 tokens and max_new_tokens 12; together they must not exceed",
        ),
    ],
)
def test_an_invalid_line_fails_before_anything_is_written(line, sentence, run_folder, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(SystemExit) as leaving:
        answer(run_folder, tmp_path / "bad.jsonl")
    assert leaving.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"zaya: generate: {tmp_path}/bad.jsonl:3")
    assert sentence in printed
    assert printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_file_without_lines(run_folder, tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(SystemExit):
        answer(run_folder, tmp_path / "none.jsonl")
    assert "none.jsonl has no line; it must have at least one" in capsys.readouterr().err
