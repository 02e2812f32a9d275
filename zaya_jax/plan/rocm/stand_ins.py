"""Stand-ins for the ROCm libraries that the plugin is linked against.

They are called to run a program, not to compile one. With stand-ins whose every function returns an
error, the plugin loads on a machine without ROCm, compiles for a described GPU, and can never run.
"""

import collections
import dataclasses
import pathlib
import re
import shutil
import subprocess

NO_DEVICE = 100
"""hipErrorNoDevice; an error in the other libraries too, where 0 alone means success."""
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
"""For symbols without a version, which the plugin does not assign to a library; the longest counts."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A function that the plugin wants from outside.

    Attributes:
      name: of the function.
      version: that the library must give it; None for any.
    """

    name: str
    version: str | None


def missing_libraries(plugin: pathlib.Path) -> list[str]:
    """Names of the shared libraries that the plugin wants and the machine does not have."""
    return re.findall(r"(\S+) => not found", _output("ldd", plugin))


def build_stand_ins(plugin: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """Builds a stand-in for each missing library; none on a machine that has ROCm.

    Args:
      plugin: the shared library that wants them.
      folder: where to put them.

    Raises:
      ValueError: if the machine has no C compiler or binutils.
    """
    libraries = missing_libraries(plugin)
    absent = [tool for tool in ("gcc", "readelf", "nm") if shutil.which(tool) is None]
    if libraries and absent:
        raise ValueError(
            f"compiling without a ROCm installation needs {', '.join(absent)}: install gcc and binutils"
        )
    wanted = _symbols_by_library(plugin, libraries)
    return [_build(name, wanted[name], folder) for name in libraries]


def _build(library: str, symbols: list[Symbol], folder: pathlib.Path) -> pathlib.Path:
    source, script, built = (folder / f"{library}{suffix}" for suffix in (".c", ".map", ""))
    source.write_text("".join(map(_definition, symbols)) or "int stand_in;\n")
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", built, source, f"-Wl,-soname,{library}"]
    versions = collections.defaultdict(list)
    for symbol in symbols:
        if symbol.version:
            versions[symbol.version].append(symbol.name)
    if versions:
        script.write_text("".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in versions.items()))
        command.append(f"-Wl,--version-script={script}")
    _output(*command)
    return built


def _definition(symbol: Symbol) -> str:
    if RETURNS_TEXT.search(symbol.name):
        return f'const char* {symbol.name}(void) {{ return "a stand-in that only compiles"; }}\n'
    return f"int {symbol.name}(void) {{ return {NO_DEVICE}; }}\n"


def _symbols_by_library(plugin: pathlib.Path, libraries: list[str]) -> dict[str, list[Symbol]]:
    owners = _version_owners(plugin)
    symbols: dict[str, list[Symbol]] = {library: [] for library in libraries}
    for line in _output("nm", "-D", "--undefined-only", plugin).splitlines():
        kind, text = line.split()[-2:]
        if kind != "U":  # a weak one may stay undefined
            continue
        name, _, version = text.replace("@@", "@").partition("@")
        library = owners.get(version) if version else _library_of(name, libraries)
        if library in symbols:
            symbols[library].append(Symbol(name, version or None))
    return symbols


def _library_of(name: str, libraries: list[str]) -> str | None:
    prefixes = [prefix for prefix in LIBRARY_OF_PREFIX if name.startswith(prefix)]
    if not prefixes:
        return None
    stem = f"lib{LIBRARY_OF_PREFIX[max(prefixes, key=len)]}.so"
    return next((library for library in libraries if library.startswith(stem)), None)


def _version_owners(plugin: pathlib.Path) -> dict[str, str]:
    """Which library a symbol's version belongs to."""
    owners, library = {}, None
    for line in _output("readelf", "-V", "--wide", plugin).splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif library and (found := re.search(r"Name: (\S+)", line)):
            owners[found[1]] = library
    return owners


def _output(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
