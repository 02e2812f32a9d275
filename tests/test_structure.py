"""The house stays readable: no circles, short functions and files, comments, one thing a name."""

import ast
import io
import pathlib
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator

import pytest
from test_architecture import KERNELS, PACKAGE, ROOMS, files, imported

PARALLEL_MAY_IMPORT = {"jax", "numpy", "jaxtyping", *sys.stdlib_module_names}
"""Collectives lie below the network, which calls them: whatever they imported, it would import too."""
PLATFORM_WORDS = re.compile(
    r"\b(?:CPUs?|ROCm|CUDA|platform_dependent|default_backend|optimization_barrier)\b", re.IGNORECASE
)
"""What only a form of an operation may know; in the network a reader would have to know it too."""
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
MEDIAN_LINES_OF_A_FUNCTION = 8
LEAST_COMMENTS = 0.08
COMMENTED_ROOMS = ("model", "optim", "train")
PRAGMA = re.compile(r"#\s*(?:noqa|type:|fmt:|pyright:)")


def test_contributors_read_of_rooms_in_this_order():
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    named = re.findall(r"^\| `zaya_jax/(\w+)(?:/|\.py)` \|", table, re.MULTILINE)
    assert len(named) > 10
    assert named == [room for room in ROOMS if room in named]


@pytest.mark.parametrize("file", files(PACKAGE / "parallel"), ids=lambda file: file.name)
def test_collectives_lie_below_the_network(file):
    others = [name for name in imported(file) if not name.startswith("zaya_jax.parallel")]
    assert {name.split(".")[0] for name in others} <= PARALLEL_MAY_IMPORT


def modules() -> dict[str, pathlib.Path]:
    """Both packages' files by the names that imports have for them."""
    named = {}
    for file in files(PACKAGE) + files(KERNELS):
        parts = file.relative_to(PACKAGE.parent if file.is_relative_to(PACKAGE) else KERNELS.parent).parts
        name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        named[name] = file
    return named


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring; those that only lead to one are peeled off. Empty without."""
    left = dict(imports)
    while leaves := [name for name, used in left.items() if not used & left.keys()]:
        left = {name: used for name, used in left.items() if name not in leaves}
    while roots := [name for name in left if not any(name in used for used in left.values())]:
        left = {name: used for name, used in left.items() if name not in roots}
    return sorted(left)


def test_no_circles():
    """An import within a function counts: it hides a circle, it does not open it."""
    known = modules()
    imports = {
        name: {full if full in known else full.rpartition(".")[0] for full in imported(file)} & known.keys()
        for name, file in known.items()
    }
    assert not circle(imports)
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set(), "b2": {"a"}}) == ["b", "c"]


@pytest.mark.parametrize("file", files(PACKAGE / "model"), ids=lambda file: file.name)
def test_the_network_knows_no_platform(file):
    words = PLATFORM_WORDS.findall(file.read_text())
    assert not words


def lines_of(file: pathlib.Path) -> tuple[set[int], set[int]]:
    """Numbers of the lines with code and of those with a comment; docstrings and pragmas are neither."""
    text = file.read_text()
    alone = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [node for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    documentation = {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    code, comments = set(), set()
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments |= set() if PRAGMA.match(token.string) else {token.start[0]}
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - documentation, comments


def lengths(file: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Functions of a file and their lines of code, the signature included."""
    code, _ = lines_of(file)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file.name}:{node.name}", len(code & set(range(node.lineno, node.end_lineno + 1)))


def test_functions_are_short():
    found = {file: list(lengths(file)) for file in files(PACKAGE) + files(KERNELS)}
    numbers = [number for each in found.values() for _, number in each]
    assert statistics.median(numbers) <= MEDIAN_LINES_OF_A_FUNCTION
    plain = [pair for file, each in found.items() if file.name != "triton.py" for pair in each]
    assert not [name for name, number in plain if number > MOST_LINES_OF_A_FUNCTION]


def test_files_are_read_in_one_sitting():
    numbers = {file: len(file.read_text().splitlines()) for file in files(PACKAGE) + files(KERNELS)}
    assert not {str(file): number for file, number in numbers.items() if number > MOST_LINES_OF_A_FILE}


@pytest.mark.parametrize("room", COMMENTED_ROOMS)
def test_comments_say_why(room):
    counts = [lines_of(file) for file in files(PACKAGE / room)]
    code, comments = (sum(map(len, kind)) for kind in zip(*counts, strict=True))
    assert comments >= LEAST_COMMENTS * code


def test_lines_are_counted_as_what_they_are(tmp_path):
    file = tmp_path / "module.py"
    lines = ['"""Words', 'of it."""', 'x = """a', 'b"""  # why', "# why", "", "def f(", "):  # noqa"]
    file.write_text("\n".join([*lines, '    """Words."""', "    return 1", ""]))
    assert lines_of(file) == ({3, 4, 7, 8, 10}, {4, 5})
    assert dict(lengths(file)) == {"module.py:f": 3}


def test_a_class_means_one_thing():
    """Among the kernels some names repeat: each operation has its own tiles."""
    homes: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert not {name: where for name, where in shared.items() if any(w.startswith("zaya_jax") for w in where)}
