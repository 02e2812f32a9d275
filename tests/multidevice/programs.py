"""Programs that tests run in separate processes: the number of devices is fixed when jax starts."""

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import quick_compilation

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
TORN = "ignore:Error reading persistent compilation cache entry"  # another process is writing the entry


# On a busy core, eight devices may take long to reach a collective; XLA aborts after 40 s.
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=500 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=500"
)


@functools.cache
def program(name: str, *arguments: str, keeps_programs: bool = True, limit_seconds: float = 500) -> Any:
    """Runs a program on eight virtual devices once, and returns the JSON of its last line."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    }
    if not keeps_programs:
        environment.pop(quick_compilation.FOLDER, None)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", TORN, str(HERE / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
