"""The public names of our packages, read from their source: what they are and where they are shown."""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

PACKAGES = ("pallas_kernels", "zaya_jax")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of ours.

    Attributes:
      name: with its package, "zaya_jax.model.cca".
      tree: its source.
    """

    name: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The page that it is on: a folder of a package, or the package for files beside the folders."""
        package, _, rest = self.name.partition(".")
        first = rest.split(".")[0]
        return f"{package}.{first}" if first and _is_folder(package, first) else package


def _is_folder(package: str, name: str) -> bool:
    return (root() / package / name).is_dir()


def root() -> pathlib.Path:
    """The checkout that this package is in."""
    return pathlib.Path(__file__).resolve().parents[2]


def read_modules() -> list[Module]:
    """All modules of our packages, in the order of their names."""
    return [
        Module(".".join(_parts(file)), ast.parse(file.read_text(encoding="utf-8")))
        for package in PACKAGES
        for file in sorted((root() / package).rglob("*.py"))
        if not any(part.startswith("_") and part != "__init__.py" for part in file.relative_to(root()).parts)
    ]


def _parts(file: pathlib.Path) -> list[str]:
    parts = list(file.relative_to(root()).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def public(body: list[ast.stmt]) -> Iterator[tuple[str, Definition, str | None]]:
    """Names that a module or a class defines, with their definitions and docstrings.

    The docstring of a value is the string behind it.
    """
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield node.name, node, ast.get_docstring(node, clean=False)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name) and not name.id.startswith("_"):
                        yield name.id, node, _string(after)


def _string(node: ast.stmt | None) -> str | None:
    is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return node.value.value if is_string and isinstance(node.value.value, str) else None  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Names:
    """Where each public name is shown.

    Attributes:
      shown: full names of modules, definitions and what classes define.
      others: names by which modules have what other ones define, with the full name there.
    """

    shown: frozenset[str]
    others: dict[str, str]

    def resolve(self, name: str, module: str = "") -> str | None:
        """The full name of what a name means in a module; None where it is none of ours."""
        for candidate in (f"{module}.{name}", name):
            found = self._follow(candidate)
            if found:
                return found
        return None

    def _follow(self, name: str) -> str | None:
        if name in self.shown:
            return name
        parts = name.split(".")
        for i in range(len(parts), 0, -1):  # a class of another module, and behind it what it defines
            if (start := ".".join(parts[:i])) in self.others:
                return self._follow(".".join([self.others[start], *parts[i:]]))
        return None


def find_names(modules: list[Module]) -> Names:
    """All public names of modules."""
    shown, others = set(), {}
    for module in modules:
        shown.add(module.name)
        shown |= set(_defined(module.name, module.tree.body))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                for alias in node.names:
                    others[f"{module.name}.{alias.asname or alias.name}"] = f"{node.module}.{alias.name}"
    return Names(frozenset(shown), {name: to for name, to in others.items() if name not in shown})


def _defined(prefix: str, body: list[ast.stmt]) -> Iterator[str]:
    for name, node, _ in public(body):
        yield f"{prefix}.{name}"
        if isinstance(node, ast.ClassDef):
            yield from _defined(f"{prefix}.{name}", node.body)
