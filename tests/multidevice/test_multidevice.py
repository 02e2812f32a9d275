"""Eight devices do what one does. In a process of its own: jax counts its devices once."""

import json
import os
import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("eight_devices_and_one.py")
ROOT = pathlib.Path(__file__).parents[2]


def test_eight_devices_train_as_one():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    differences = json.loads(result.stdout.splitlines()[-1])
    assert differences["devices"] == 8
    assert differences["tokens"] == [2 * 200] * 5  # of two layers; padding is no token
    assert differences["moved"] > 1e-2
    for name in ("losses", "gradient_norms", "weights", "router_counts", "router_biases"):
        assert differences[name] < 1e-5, differences
