"""Log rules: classes of lines, rates, and invalid files."""

import json
import pathlib
import time

import pytest

from zaya_jax.aegis.agent.log_denials import without_denials
from zaya_jax.aegis.agent.log_rules import ACTIONS, HARMLESS, Rates, classify, load_rules
from zaya_jax.aegis.command import main

LINES = [
    json.loads(line) for line in (pathlib.Path(__file__).parent / "log_lines.jsonl").read_text().splitlines()
]
"""Lines with their classes: some were printed by programs on our machines, others are written by us in the
format of drivers' and libraries' messages. They do not measure the accuracy of the rules on other logs."""


HEALTHY = (pathlib.Path(__file__).parent / "healthy_lines.txt").read_text().splitlines()
"""Lines written by us in the style of dmesg, rasdaemon, amd-smi, mlx5, NVMe, Lustre and SLURM on healthy
systems: zero counts, negations, states, summaries, and banners of monitors."""


FAULTS = (pathlib.Path(__file__).parent / "faults_with_negations.txt").read_text().splitlines()
"""Lines written by us in the style of drivers and libraries: faults described with "no", "not" or 0."""


@pytest.fixture(scope="module")
def rules():
    return load_rules()


def class_of(rules, line):
    found = classify(rules, line)
    return HARMLESS if found is None else found.name


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["line"][:40])
def test_classes_of_lines(rules, line):
    assert class_of(rules, line["line"]) == line["class"], line


@pytest.mark.parametrize("line", HEALTHY, ids=lambda line: line[:40])
def test_healthy_lines_have_no_class_or_only_notes(rules, line):
    found = classify(rules, line)
    assert found is None or found.action == "note", found


@pytest.mark.parametrize("line", FAULTS, ids=lambda line: line[:40])
def test_faults_with_negations_are_classified(rules, line):
    assert classify(rules, line) is not None


def test_there_are_enough_healthy_lines():
    assert len(set(HEALTHY)) >= 300


@pytest.mark.parametrize(
    ("denied", "fault"),
    [
        ("no correctable errors", "2 uncorrectable errors detected"),
        ("correctable errors: 0", "uncorrectable errors detected: 0x10"),
        ("0 ECC errors", "xgmi link 0 error"),
        ("thermal throttling: none", "amdgpu: GPU reset begin!"),
        ("GPU 0 is not hung", "OSError: [Errno 28] No space left on device"),
        ("timeouts: 0", "connect: No route to host"),
        ("nothing failed before", "nfs: server filer not responding"),
    ],
)
@pytest.mark.parametrize("form", ["{}; {}", "{}, {}", "{1}; {0}"])
def test_a_denial_does_not_hide_another_fault_of_its_line(rules, denied, fault, form):
    assert class_of(rules, form.format(denied, fault)) == class_of(rules, fault) != HARMLESS


@pytest.mark.parametrize(
    "line",
    [
        "error " * 700,
        "no error " * 500,
        "errors_x_error_" * 300,
        "0 errors, " * 400,
        "not any a " * 400,
    ],
    ids=lambda line: line[:10],
)
def test_denials_are_removed_in_linear_time(line):
    """A pattern with quadratic backtracking would take minutes at this length."""
    began = time.process_time()
    without_denials(line)
    assert time.process_time() - began < 5.0


def test_every_class_has_an_action(rules):
    assert {rule.action for rule in rules} <= set(ACTIONS)
    assert len({rule.name for rule in rules}) == len(rules)


def test_very_long_lines_are_classified_fast(rules):
    assert class_of(rules, "error " * 1_000_000) == HARMLESS


def test_a_class_takes_effect_at_its_count(rules):
    first, counted = (next(r for r in rules if r.name == name) for name in ("gpu_lost", "ecc_correctable"))
    rates = Rates()
    assert rates.add(first, 10.0)
    assert not any(rates.add(counted, float(second)) for second in range(99))
    assert rates.add(counted, 99.0)
    assert not rates.add(counted, 100.0)  # counted from nothing


def test_lines_outside_the_window_do_not_count(rules):
    counted = next(rule for rule in rules if rule.name == "ecc_correctable")
    rates = Rates()
    assert not any(rates.add(counted, 60.0 * minute) for minute in range(10_000))


RULE = '[[rule]]\nclass = "a"\naction = "note"\npatterns = ["b"]\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"has no \[\[rule\]\] table; add at least one"),
        ("a = ", "is not TOML: "),
        ("[[rule]]\n", "rule 1 has no class; it must be a string"),
        (
            RULE + RULE.replace('"note"', '"call"'),
            r'rule 2 \("a"\) has the action "call"; it must be one of note, wait',
        ),
        (RULE.replace('["b"]', "[]"), "has no patterns; they must be a list of regular expressions"),
        (RULE.replace('"b"', '"("'), r'has the invalid regular expression "\(": missing \)'),
        (RULE + "counts = 3\n", 'has the unknown field "counts"; did you mean "count"'),
        (
            RULE + "count = 3\n",
            "has count 3, but no seconds; set within how many seconds the lines must come",
        ),
        (RULE + "count = 0\n", "has count 0 and seconds 0.0; they must be at least 1 and 0"),
    ],
)
def test_invalid_files_of_rules_are_rejected(text, sentence, tmp_path):
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        load_rules(str(tmp_path / "rules.toml"))


def test_a_missing_file_of_rules_is_named():
    with pytest.raises(ValueError, match=r"no file at nowhere\.toml"):
        load_rules("nowhere.toml")


def test_classify_command(tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_bytes(
        b"step 1\n[rank0] OSError: [Errno 28] No space left on device\n\xff\xfe\n"
        b"amdgpu 0000:0a:00.0: amdgpu: GPU reset begin!\nstep 2\nNo space left on device\n"
    )
    main(["classify", str(log)])
    output = capsys.readouterr().out
    assert "2: [rank0] OSError" in output.replace("\n", " ")
    main(["classify", str(log), "--json"])
    full, lost = json.loads(capsys.readouterr().out)
    assert (full["class"], full["lines"], full["first"][0], full["last"][0]) == ("disk_full", 2, 2, 6)
    assert (lost["class"], lost["action"]) == ("gpu_lost", "drain")


def test_a_log_without_failures(tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text("step 1\nno uncorrectable errors found on GPU 3\n")
    main(["classify", str(log)])
    assert capsys.readouterr().out == "no line matches a rule: no known failure\n"
    main(["classify", str(log), "--json"])
    assert json.loads(capsys.readouterr().out) == []
