"""Stub libraries that replace the ROCm libraries that the plugin is linked against.

They are called to run a program, not to compile one. With stubs whose functions all return an error, the
plugin loads on a machine without ROCm and can compile for a described GPU, but not run anything.
"""

import collections
import dataclasses
import pathlib
import re
import shutil
import subprocess

from zaya_jax.errors import UserError

NO_DEVICE = 100
"""hipErrorNoDevice; an error in the other libraries too, where only 0 means success."""
# Functions that return a string: the caller would take an error code for the address of one.
RETURNS_TEXT = re.compile(r"(GetErrorString|GetErrorName|GetLastError|status_string|kind_name)$")
LIBRARY_OF_PREFIX = {
    "hipblasLt": "hipblaslt",
    "_ZN13hipblaslt": "hipblaslt",
    "_ZNK13hipblaslt": "hipblaslt",
    "hipfft": "hipfft",
    "miopen": "MIOpen",
    "nccl": "rccl",
    "rocblas": "rocblas",
    "rocprofiler": "rocprofiler-sdk",
    "rsmi": "rocm_smi64",
    "amdsmi": "amd_smi",
    "hsa": "hsa-runtime64",
    "hip": "amdhip64",
    "__hip": "amdhip64",
}
"""Library by prefix, for symbols without a version, which the plugin does not assign to a library; the
longest prefix counts."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A function that the plugin imports.

    Attributes:
      name: name of the function.
      version: symbol version that the library must define; None for any.
    """

    name: str
    version: str | None


def missing_libraries(plugin: pathlib.Path) -> list[str]:
    """Names of the shared libraries that the plugin needs and this machine does not have."""
    return re.findall(r"(\S+) => not found", _output("ldd", plugin))


def build_stubs(plugin: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """Builds a stub for each missing library; none on a machine with ROCm.

    Args:
      plugin: shared library that needs them.
      folder: output folder.

    Raises:
      UserError: if the machine has no C compiler or binutils.
    """
    libraries = missing_libraries(plugin)
    absent = [tool for tool in ("gcc", "readelf", "nm") if shutil.which(tool) is None]
    if libraries and absent:
        raise UserError(
            f"compiling without a ROCm installation needs {', '.join(absent)}: install gcc and binutils"
        )
    wanted = _symbols_by_library(plugin, libraries)
    return [_build(name, wanted[name], folder) for name in libraries]


def _build(library: str, symbols: list[Symbol], folder: pathlib.Path) -> pathlib.Path:
    source, script, built = (folder / f"{library}{suffix}" for suffix in (".c", ".map", ""))
    source.write_text("".join(map(_definition, symbols)) or "int stub;\n")
    # The loader of the plugin finds a library that is loaded already by its soname.
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", built, source, f"-Wl,-soname,{library}"]
    versions = collections.defaultdict(list)
    for symbol in symbols:
        if symbol.version:
            versions[symbol.version].append(symbol.name)
    if versions:
        # The linker accepts a versioned symbol only from a library that defines this version.
        script.write_text("".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in versions.items()))
        command.append(f"-Wl,--version-script={script}")
    _output(*command)
    return built


def _definition(symbol: Symbol) -> str:
    if RETURNS_TEXT.search(symbol.name):
        return f'const char* {symbol.name}(void) {{ return "a stub that only compiles"; }}\n'
    return f"int {symbol.name}(void) {{ return {NO_DEVICE}; }}\n"


def _symbols_by_library(plugin: pathlib.Path, libraries: list[str]) -> dict[str, list[Symbol]]:
    owners = _version_owners(plugin)
    symbols: dict[str, list[Symbol]] = {library: [] for library in libraries}
    for line in _output("nm", "-D", "--undefined-only", plugin).splitlines():
        kind, text = line.split()[-2:]
        if kind != "U":  # a weak one may stay undefined
            continue
        # `nm` writes two at signs before the default version of a symbol, and one before others.
        name, _, version = text.replace("@@", "@").partition("@")
        library = owners.get(version) if version else _library_of(name, libraries)
        # Functions of a library that this machine has need no stub.
        if library in symbols:
            symbols[library].append(Symbol(name, version or None))
    return symbols


def _library_of(name: str, libraries: list[str]) -> str | None:
    prefixes = [prefix for prefix in LIBRARY_OF_PREFIX if name.startswith(prefix)]
    if not prefixes:
        return None
    stem = f"lib{LIBRARY_OF_PREFIX[max(prefixes, key=len)]}.so"
    # After the stem comes a version, as in librccl.so.1.
    return next((library for library in libraries if library.startswith(stem)), None)


def _version_owners(plugin: pathlib.Path) -> dict[str, str]:
    """Library of each symbol version."""
    owners, library = {}, None
    for line in _output("readelf", "-V", "--wide", plugin).splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+)", line)):
            owners[match[1]] = library
    return owners


def _output(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
