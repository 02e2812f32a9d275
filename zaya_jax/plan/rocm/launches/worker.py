"""`python -m zaya_jax.plan.rocm.launches.worker PIPE FOLDER`: compiles launches of kernels one by one.

Through PIPE, a file descriptor, it receives clusters, programs of `zaya_jax.plan.rocm.launches.lowering` and
options of XLA. It replies to each with a `CompiledLaunch`, or with the message of an error; or with None if
this process has compiled the same machine code for another program: XLA remembers it and writes no file. Then
another process must compile the program.

The worker is a separate process because the plugin may abort. It stays alive because loading the plugin takes
ten times as long as compiling a kernel. FOLDER is for temporary files; FOLDER/code is the compiler's folder
for its own.
"""

import contextlib
import math
import pathlib
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import jax
from jax import export
from jax.sharding import SingleDeviceSharding

from zaya_jax.plan.rocm.code_objects import LAUNCH, files_in_order, sizes_of
from zaya_jax.plan.rocm.launches.cache import CompiledLaunch
from zaya_jax.plan.rocm.worker import make_devices


def compile_launch(
    program: bytes, options: dict[str, Any], device: Any, folder: pathlib.Path
) -> CompiledLaunch | None:
    """Compiles a program of one launch; None if XLA writes no code, because it remembers it.

    Args:
      program: serialized program with one kernel.
      options: options of XLA.
      device: abstract device.
      folder: folder for temporary files; code objects appear in its folder `code`.

    Raises:
      ValueError: if the program launches anything but one kernel.
    """
    # jax reads no immutable bytes.
    exported = export.deserialize(bytearray(program))
    # The program names a platform; the abstract device says which GPU of it.
    there = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=there) for each in exported.in_avals]
    lowered = jax.jit(exported.call, out_shardings=there, keep_unused=True).lower(*arguments)
    with tempfile.TemporaryDirectory(dir=folder, prefix="dump_") as dump:
        lowered.compile(compiler_options={"xla_dump_to": dump} | options)
        # Only the dump has the sizes of a launch.
        lists = [path.read_text() for path in pathlib.Path(dump).glob("*thunk_sequence.txt")]
    launches = [launch for text in lists for launch in LAUNCH.findall(text)]
    # XLA adds kernels that copy if it chooses another layout for an operand or a result.
    if len(launches) != 1:
        raise ValueError(f"the program launches {len(launches)} kernels instead of one: {launches}")
    kernel, grid, threads, lds_bytes = launches[0]
    code = _take_code_object(folder / "code", kernel)
    if code is None:
        return None
    x, y, z = sizes_of(grid)
    return CompiledLaunch(
        kernel=kernel,
        code=code,
        grid=(x, y, z),
        threads=math.prod(sizes_of(threads)),
        lds_bytes=int(lds_bytes),
    )


def _take_code_object(folder: pathlib.Path, kernel: str) -> bytes | None:
    """Returns the code object of a kernel that the compiler has just written, and deletes its files."""
    found = None
    # The folder also has LLVM code, and a code object of the program's constants.
    for file in files_in_order(folder, "*"):
        # The symbol of a kernel descriptor is the kernel's name with this suffix.
        if file.suffix == ".hsaco" and f"\0{kernel}.kd\0".encode() in (code := file.read_bytes()):
            found = code
        file.unlink()
    return found


def main(pipe: Connection, folder: pathlib.Path) -> None:
    """Replies to requests until the pipe is closed."""
    with contextlib.suppress(EOFError):
        while True:
            cluster, program, options = pipe.recv()
            device = make_devices(cluster, folder)[0]
            try:
                reply = compile_launch(program, options, device, folder)
            except Exception as error:  # the other process reports it with the kernel's name
                reply = f"{type(error).__name__}: {error}"
            pipe.send(reply)
            # A compiled program is never used again.
            jax.clear_caches()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), pathlib.Path(sys.argv[2]))
