"""Writes that are killed at every line of `zaya_jax.files.durable`; prints the results as JSON.

It is a separate process because it forks, which a process with JAX's threads must not do. It loads only that
file, because `import zaya_jax` would load JAX.
"""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable

OLD, NEW = {"a": "old", "inner/b": "old"}, {"a": "new", "c": "new"}


def load(path: str):
    spec = importlib.util.spec_from_file_location("durable", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def killed_at(line: int, action: Callable[[], None], files: set[str]) -> bool:
    """Runs `action` in a child that exits at a given line of `files`; returns whether it reached that
    line.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os._exit(9)
        return trace

    sys.settrace(trace)
    action()
    sys.settrace(None)
    os._exit(0)


def fill(folder: pathlib.Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def state(path: pathlib.Path) -> str:
    """Returns what is at a path: "old", "new", "nothing" or something invalid."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        content = {str(file.relative_to(path)): file.read_text() for file in files}
        return "old" if content == OLD else "new" if content == NEW else f"neither: {content}"
    return path.read_text() if path.exists() else "nothing"


def main() -> None:
    durable = load(sys.argv[1])
    root = pathlib.Path(sys.argv[2])
    place = root / "place"

    def build(*, replace: bool) -> None:
        with durable.temporary_folder(place, replace=replace) as aside:
            fill(aside, NEW)

    def build_on_nfs() -> None:
        durable.ctypes.CDLL = lambda _: None
        build(replace=True)

    actions = {
        "a new file": (lambda: None, lambda: durable.write(place, "new")),
        "a file in another's place": (lambda: place.write_text("old"), lambda: durable.write(place, "new")),
        "a new folder": (lambda: None, lambda: build(replace=False)),
        "a folder in another's place": (lambda: fill(place, OLD), lambda: build(replace=True)),
        "the same on NFS": (lambda: fill(place, OLD), build_on_nfs),
        "a folder removed": (lambda: fill(place, OLD), lambda: durable.remove_folder(place)),
    }
    actual = {}
    for name, (before, action) in actions.items():
        actual[name] = []
        # A folder is removed file by file.
        files = {durable.__file__, *([shutil.__file__] if name == "a folder removed" else [])}
        for line in range(1, 1000):
            root.mkdir()
            before()
            was_killed = killed_at(line, action, files)
            beside = sorted(state(path) for path in root.iterdir() if path != place)
            actual[name].append((state(place), beside))
            shutil.rmtree(root)
            if not was_killed:
                break
        else:
            raise AssertionError(f"{name} has no end")
    print(json.dumps(actual))


if __name__ == "__main__":
    main()
