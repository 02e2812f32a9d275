"""`python -m zaya_jax.aegis.doctor.probe`: prints the devices that jax finds, as a line of JSON.

It runs in a separate process, because an unknown XLA flag aborts the process, and a driver may do so as well.
"""

import ctypes
import json
from typing import Any

LIBRARY = "librccl.so.1"


def main() -> None:
    """Prints the platform, the kinds of all devices, and the version of RCCL."""
    import jax

    devices = jax.devices()
    values = {
        "platform": devices[0].platform,
        "kinds": [each.device_kind for each in devices],
        "rccl": rccl_version(),
    }
    print(json.dumps(values))


def rccl_version(library: str = LIBRARY) -> str | None:
    """Returns the version of RCCL, such as "2.27.7"; None if it cannot be loaded."""
    try:
        loaded: Any = ctypes.CDLL(library)
    except OSError:
        return None
    number = ctypes.c_int()
    # RCCL has the interface of NCCL, whose functions return 0 if they succeed.
    return None if loaded.ncclGetVersion(ctypes.byref(number)) else describe_version(number.value)


def describe_version(number: int) -> str:
    """Formats a version number: "2.27.7" for 22707 (`NCCL_VERSION` in nccl.h, since 2.9)."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


if __name__ == "__main__":
    main()
