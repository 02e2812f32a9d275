"""`python -m zaya_jax.aegis.probe`: what jax finds on this machine, as a line of JSON.

In a process of its own: a flag that XLA does not know aborts the process, and so may a driver.
"""

import ctypes
import json
from typing import Any

LIBRARY = "librccl.so.1"


def main() -> None:
    """Prints the platform, all devices' kinds, and RCCL's version where there is one."""
    import jax

    devices = jax.devices()
    found = {
        "platform": devices[0].platform,
        "kinds": [each.device_kind for each in devices],
        "rccl": rccl_version(),
    }
    print(json.dumps(found))


def rccl_version(library: str = LIBRARY) -> str | None:
    """The version that RCCL itself tells, such as "2.27.7"; None without the library."""
    try:
        loaded: Any = ctypes.CDLL(library)
    except OSError:
        return None
    number = ctypes.c_int()
    return None if loaded.ncclGetVersion(ctypes.byref(number)) else describe_version(number.value)


def describe_version(number: int) -> str:
    """Of 22707 it is "2.27.7" (`NCCL_VERSION` in nccl.h, from 2.9 on)."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


if __name__ == "__main__":
    main()
