"""Plain technical English: phrases with a standard term are rare, and each that stays is meant literally.

`python tests/test_language.py [FILE OR FOLDER...]` lists where each phrase is.
"""

import functools
import pathlib
import re
import sys

from source_files import KERNELS, PACKAGE, ROOT, prose, python_files

LIMITS = {
    r"behind": (10, "saved behind a step"),
    r"anew": (0, "begins anew"),
    r"whoever|whom": (0, "whoever reads it"),
    r"beside": (2, "a file beside it"),
    r"in place of": (0, "zeros in place of\nthe rows"),
    r"befell|befalls?": (0, "what befell a run"),
    r"(?:stood|stands?|standing) still": (1, "the run stands still"),
    r"(?:is|are|was|were) told|tells? of": (1, "the user is told"),
    r"of (?:its|their|one's) own": (20, "a folder of its own"),
    r"keepers? of runs": (0, "other keepers of runs"),
    r"verbs?": (11, "each verb"),
    r"this room|each room|a room|rooms": (0, "each room of the house"),
    r"(?:bits|nats|bytes|tokens|ms) an? (?:byte|token|second|step)": (2, "4 tokens a second"),
    r"(?:lies|lie|stands|stand) (?:in|on|at|for|there|before|behind|below|above)": (
        18,
        "it lies in a folder",
    ),
    r"(?:asks?|asked|is asked) for": (2, "it asks for a file"),
    r"(?:leaves?|leaving|left) (?:it |them )?out": (6, "a row is left out"),
    r"h(?:olds?|eld) against": (0, "held against a reference"),
    r"there is no (?:config )?(?:field|option)": (0, "there is no field lr"),
    r"deals? out|dealt": (0, "rows are dealt"),
    r"by and by": (0, "files go by and by"),
    r"goes on|go on|going on|went on": (9, "the run goes on"),
    r"what (?:it|they|he) (?:is|are) told": (0, "does what it is told"),
    r"passed over|sets? aside aloud|aloud": (0, "passed over aloud"),
}
"""Pattern of a phrase: how often it may occur in all prose, and an example that the pattern must find."""
OWN_NAMES = {pathlib.Path(__file__).resolve()}
"""Files that contain the phrases as data."""
FOLDERS = {"docs": ".md", "notebooks": ".py", "configs": "", "tests": ".py", ".ci": "", "zaya_jax": ""}
"""Folders with prose beyond the Python files of both packages, and the suffix of their files; "" for all."""
NOT_PROSE = {".json", ".png", ".npz", ".pyc", ".bin", ".txt", ".jsonl"}
"""Suffixes of data, such as recorded log lines of other programs."""


def pages() -> list[pathlib.Path]:
    """Files with prose of ours: comments, docstrings, messages, documentation, scripts and web pages."""
    found = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", *python_files(PACKAGE, KERNELS)]
    for folder, suffix in FOLDERS.items():
        files = (path for path in (ROOT / folder).rglob(f"*{suffix}") if path.is_file())
        found += [path for path in files if path.suffix not in NOT_PROSE and "__pycache__" not in path.parts]
    return sorted(set(found) - OWN_NAMES)


@functools.cache
def texts(*paths: pathlib.Path) -> dict[pathlib.Path, str]:
    """Prose of all our files, or of the files and folders named."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {file: prose(file, with_all_strings=True) for file in files or pages()}


def occurrences(pattern: str, prose_by_file: dict[pathlib.Path, str]) -> list[str]:
    """FILE: PHRASE for each occurrence, in any case of letters and across line ends."""
    spaced = re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+(?:#\s+)?"), re.IGNORECASE)
    return [f"{file}: {match[0]}" for file, text in prose_by_file.items() for match in spaced.finditer(text)]


def test_phrases_with_a_standard_term_are_rare():
    prose_by_file = texts()
    places = {pattern: occurrences(pattern, prose_by_file) for pattern in LIMITS}
    assert not {pattern: each for pattern, each in places.items() if len(each) > LIMITS[pattern][0]}


def test_each_pattern_finds_its_example():
    """A pattern with a typo would find nothing, and its limit would always hold."""
    examples = {pathlib.Path(pattern): example for pattern, (_, example) in LIMITS.items()}
    assert {str(path) for path in examples if not occurrences(str(path), {path: examples[path]})} == set()


def test_prose_of_every_kind_is_read():
    read = {str(path.relative_to(ROOT)): text for path, text in texts().items()}
    for name in (
        "README.md", "docs/tutorial.md", ".ci/run", "pyproject.toml", "configs/tiny.py", "notebooks/tour.py",
        "configs/cluster/alerts.yaml", "zaya_jax/cli.py", "pallas_kernels/choice.py", "tests/conftest.py",
        "zaya_jax/serving/page/index.html",
    ):  # fmt: skip
        assert len(read[name].split()) > 50, name
    assert len(read) > 700


def test_phrases_are_found_in_comments_docstrings_and_messages(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Behind\nit."""\nx = behind = f"go\\n{1} behind"  # begin anew\n# left\n# out\n')
    prose_by_file = texts(file)
    assert len(occurrences("behind", prose_by_file)) == 2
    assert len(occurrences("anew|ane", prose_by_file)) == 1
    assert len(occurrences("left out", prose_by_file)) == 1


if __name__ == "__main__":
    selected = texts(*map(pathlib.Path, sys.argv[1:]))
    for pattern, (limit, _) in LIMITS.items():
        places = occurrences(pattern, selected)
        print(f"{len(places)} of at most {limit}: {pattern}", *places, sep="\n  ")
