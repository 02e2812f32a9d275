"""Sums of gradients over devices that gloo connects, as those of processes on CPUs."""

import pathlib
import sys

from groups import finish, start_words

PROGRAM = pathlib.Path(__file__).with_name("sums.py")
LAUNCH = (
    "import sys; from zaya_jax.parallel.processes.launch import *; "
    "sys.exit(launch(Launch(sys.argv[1:], num_processes=1, devices=4)))"
)


def test_sums_next_to_other_collectives_are_exact():
    code, output = finish(start_words([sys.executable, "-c", LAUNCH, sys.executable, str(PROGRAM)]))
    assert code == 0, output
    assert "0 of 100 calls were wrong" in output, output
