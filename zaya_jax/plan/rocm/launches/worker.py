"""`python -m zaya_jax.plan.rocm.launches.worker DEVICE FOLDER`: compiles launches of kernels one by one.

It reads one request per line from standard input, `{"program": BASE64, "options": {...}}` with a program of
`zaya_jax.plan.rocm.launches.lowering`, and replies with one line of JSON: the fields of `CompiledLaunch`, or
`{"error": MESSAGE}`. It ends with its input. `"code"` is null if this process has compiled the same machine
code for another program: XLA remembers it and writes no file. Then another process must compile the program.

The worker is a separate process because the plugin may abort. It stays alive because loading the plugin takes
ten times as long as compiling a kernel. FOLDER is for temporary files; FOLDER/code is the compiler's folder
for its own (`worker_environment`).
"""

import base64
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import jax
from jax import export
from jax.sharding import SingleDeviceSharding

from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.rocm.code_objects import LAUNCH, files_in_order
from zaya_jax.plan.rocm.worker import make_devices


def compile_launch(
    program: bytes, options: dict[str, Any], device: Any, folder: pathlib.Path
) -> dict[str, Any]:
    """Compiles a program of one launch and returns the fields of `CompiledLaunch`, its code in base64.

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
    return {
        "kernel": kernel,
        "grid": _numbers(grid),
        "threads": _product(_numbers(threads)),
        "lds_bytes": int(lds_bytes),
        "code": None if code is None else base64.b64encode(code).decode(),
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _product(numbers: list[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


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


def main(device_name: str, folder: pathlib.Path) -> None:
    """Replies to requests until standard input ends."""
    # The compiler may print; what it prints must not end up between the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    cluster = Cluster(device=find_device(device_name), nodes=1, gpus_per_node=1)
    device = make_devices(cluster, folder)[0]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            program = base64.b64decode(request["program"])
            reply = compile_launch(program, request["options"], device, folder)
        except Exception as error:  # the other process reports it with the kernel's name
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        # A compiled program is never used again.
        jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
