"""Our source files as syntax trees, comments and docstrings, for tests that read the code."""

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "zaya_jax"
KERNELS = ROOT / "pallas_kernels"
PRAGMA = re.compile(r"#\s*(?:noqa|type:|fmt:|pyright:)")
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@functools.cache
def python_files(*folders: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """All Python files of some folders; both packages if none is named."""
    actual = [file for folder in folders or (PACKAGE, KERNELS) for file in sorted(folder.rglob("*.py"))]
    assert actual
    return tuple(actual)


@functools.cache
def tree_of(file: pathlib.Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imported_names(file: pathlib.Path) -> tuple[str, ...]:
    """Full names of what a file imports, at its top or inside functions."""
    names = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports must be absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Files of both packages by the names under which they are imported."""
    named = {}
    for file in python_files():
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts).removesuffix(".__init__")] = file
    return named


def docstrings(tree: ast.Module) -> list[ast.Constant]:
    """Strings that are statements of a module: docstrings of modules, classes, functions and attributes."""
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [node for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a source text."""
    return tokenize.generate_tokens(io.StringIO(text).readline)


@functools.cache
def code_and_comment_lines(file: pathlib.Path) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of the lines with code and of those with a comment; docstrings and pragmas are neither."""
    text = file.read_text(encoding="utf-8")
    documentation = {
        line
        for node in docstrings(ast.parse(text))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code, comments = set(), set()
    for token in tokens_of(text):
        if token.type == tokenize.COMMENT:
            comments |= set() if PRAGMA.match(token.string) else {token.start[0]}
        elif token.type not in LAYOUT_TOKENS:
            code |= set(range(token.start[0], token.end[0] + 1))
    return frozenset(code - documentation), frozenset(comments)


def prose(file: pathlib.Path, *, with_all_strings: bool = False) -> str:
    """Comments and docstrings of a Python file, on request all other strings too; whole text of others."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    tokens = list(tokens_of(text))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    if not with_all_strings:
        return "\n".join([*comments, *(str(node.value) for node in docstrings(ast.parse(text)))])
    kinds = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return "\n".join([*comments, *(token.string for token in tokens if token.type in kinds)])


def function_lengths(file: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Functions of a file with their lines of code, the signature included."""
    code, _ = code_and_comment_lines(file)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{file.name}:{node.name}", len(code & set(range(node.lineno, node.end_lineno + 1)))
