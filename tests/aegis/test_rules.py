"""Rules for lines of logs: lines with their classes, rates, and files that are none."""

import json
import pathlib

import pytest

from zaya_jax.aegis.command import main
from zaya_jax.aegis.rules import ACTIONS, HARMLESS, Rates, classify, load_rules

LINES = [
    json.loads(line) for line in (pathlib.Path(__file__).parent / "log_lines.jsonl").read_text().splitlines()
]
"""Each with its class: those that were seen are what programs printed here, the others are ours, in the form
that drivers and libraries give their messages. How the rules do on unseen logs is not shown by them."""


@pytest.fixture(scope="module")
def rules():
    return load_rules()


def class_of(rules, line):
    found = classify(rules, line)
    return HARMLESS if found is None else found.name


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["line"][:40])
def test_lines_are_of_their_class(rules, line):
    assert class_of(rules, line["line"]) == line["class"], line


def test_every_class_says_what_to_do(rules):
    assert {rule.action for rule in rules} <= set(ACTIONS)
    assert len({rule.name for rule in rules}) == len(rules)


def test_a_line_without_an_end_takes_no_time(rules):
    assert class_of(rules, "error " * 1_000_000) == HARMLESS


def test_a_class_acts_at_its_first_line_unless_it_counts(rules):
    first, counted = (next(r for r in rules if r.name == name) for name in ("gpu_lost", "ecc_correctable"))
    rates = Rates()
    assert rates.add(first, 10.0)
    assert not any(rates.add(counted, float(second)) for second in range(99))
    assert rates.add(counted, 99.0)
    assert not rates.add(counted, 100.0)  # counted from nothing


def test_lines_that_come_slowly_never_act(rules):
    counted = next(rule for rule in rules if rule.name == "ecc_correctable")
    rates = Rates()
    assert not any(rates.add(counted, 60.0 * minute) for minute in range(10_000))


RULE = '[[rule]]\nclass = "a"\naction = "note"\npatterns = ["b"]\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"has no \[\[rule\]\]; it must have at least one"),
        ("a = ", "is not TOML: "),
        ("[[rule]]\n", "rule 1 has no class; it must be a word"),
        (
            RULE + RULE.replace('"note"', '"call"'),
            r'rule 2 \("a"\) has the action "call"; it must be note, wait',
        ),
        (RULE.replace('["b"]', "[]"), "has no patterns; it must have a list of regular expressions"),
        (RULE.replace('"b"', '"("'), r'has the pattern "\(", which is none: missing \)'),
        (RULE + "counts = 3\n", 'has the field "counts"; did you mean "count"'),
        (RULE + "count = 3\n", "counts 3 lines; it must say within how many seconds"),
        (RULE + "count = 0\n", "has count 0 and seconds 0.0; they must be 1 or above, and 0"),
    ],
)
def test_a_file_that_has_no_rules_is_refused(text, sentence, tmp_path):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load_rules(str(tmp_path / "rules.toml"))


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"there is no file nowhere\.toml"):
        load_rules("nowhere.toml")


def test_a_log_is_told_by_class(tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_bytes(
        b"step 1\n[rank0] OSError: [Errno 28] No space left on device\n\xff\xfe\n"
        b"amdgpu 0000:0a:00.0: amdgpu: GPU reset begin!\nstep 2\nNo space left on device\n"
    )
    main(["classify", str(log)])
    said = capsys.readouterr().out
    assert "2: [rank0] OSError" in said.replace("\n", " ")
    main(["classify", str(log), "--json"])
    full, lost = json.loads(capsys.readouterr().out)
    assert (full["class"], full["lines"], full["first"][0], full["last"][0]) == ("disk_full", 2, 2, 6)
    assert (lost["class"], lost["action"]) == ("gpu_lost", "drain")
