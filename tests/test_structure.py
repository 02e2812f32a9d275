"""Limits that keep the code readable: sizes of functions, files and folders, shares of comments, names."""

import ast
import collections
import pathlib
import re
import statistics
import tomllib

from source_files import (
    KERNELS,
    PACKAGE,
    ROOT,
    code_and_comment_lines,
    function_lengths,
    modules,
    python_files,
    tree_of,
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 8
MAX_MODULES_OF_A_FOLDER = 15
MIN_COMMENT_SHARE = 0.08
"""Comment lines by code lines, in each package."""


def test_functions_are_short():
    lengths = {file: list(function_lengths(file)) for file in python_files()}
    assert statistics.median(n for each in lengths.values() for _, n in each) <= MAX_MEDIAN_FUNCTION_LINES
    # A Triton kernel is one function by nature.
    plain = [pair for file, each in lengths.items() if file.name != "triton.py" for pair in each]
    assert not [name for name, number in plain if number > MAX_FUNCTION_LINES]


def test_ruff_limits_the_complexity_of_functions():
    """Ruff fails on a cyclomatic complexity of 12, except in kernels and tests."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "C901" in lint["select"]
    assert lint["mccabe"]["max-complexity"] <= 11
    exempt = {place for place, rules in lint["per-file-ignores"].items() if "C901" in rules}
    assert exempt == {"tests/**", "pallas_kernels/**"}
    ignored = [file for file in python_files() if re.search(r"noqa:[^\n]*C901", file.read_text())]
    assert not ignored


def test_files_are_read_in_one_sitting():
    numbers = {file: len(file.read_text().splitlines()) for file in python_files()}
    assert not {str(file): number for file, number in numbers.items() if number > MAX_FILE_LINES}


def test_folders_are_small():
    numbers = collections.Counter(file.parent for file in python_files() if file.name != "__init__.py")
    assert not {str(folder): n for folder, n in numbers.items() if n > MAX_MODULES_OF_A_FOLDER}


def stem(name: str) -> str:
    """The word that a file name has in common with its twins: `saves`, `saving`, `saved` are one."""
    return re.sub(r"(?:ings?|ed|es|e|s)$", "", name)


def test_no_file_has_a_twin_in_its_folder():
    names = collections.defaultdict(list)
    for file in python_files():
        names[file.parent, stem(file.stem)].append(file.name)
    assert not {str(folder): each for (folder, _), each in names.items() if len(each) > 1}
    assert stem("saves") == stem("saving") == stem("save") != stem("state")


def comment_share(folder: pathlib.Path) -> float:
    counts = [code_and_comment_lines(file) for file in python_files(folder)]
    code, comments = (sum(map(len, kind)) for kind in zip(*counts, strict=True))
    return comments / code


def test_comments_say_why_in_every_package():
    folders = [KERNELS, *(path.parent for path in PACKAGE.glob("*/__init__.py"))]
    shares = {folder.name: comment_share(folder) for folder in folders}
    assert not {name: share for name, share in shares.items() if share < MIN_COMMENT_SHARE}


def test_lines_are_counted_as_what_they_are(tmp_path):
    file = tmp_path / "module.py"
    lines = ['"""Words', 'of it."""', 'x = """a', 'b"""  # why', "# why", "", "def f(", "):  # noqa"]
    file.write_text("\n".join([*lines, '    """Words."""', "    return 1", ""]))
    assert code_and_comment_lines(file) == ({3, 4, 7, 8, 10}, {4, 5})
    assert dict(function_lengths(file)) == {"module.py:f": 3}


def test_a_class_name_means_one_thing():
    """Among the kernels some names repeat: each operation has its own tiles."""
    places = collections.defaultdict(list)
    for name, file in modules().items():
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert not {name: where for name, where in shared.items() if any(w.startswith("zaya_jax") for w in where)}
