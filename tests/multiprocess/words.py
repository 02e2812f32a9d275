"""Messages that one of several processes sends and receives; prints a line of JSON. usage: words.py
LATE_PROCESS
"""

import json
import os
import sys
import time

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError, PeerTimeout
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.parallel.processes.stop_agreement import StopAgreement


def main(late: int) -> None:
    group = find_process_group(os.environ)
    assert group is not None
    hosts.start(group, limit_seconds=20)
    number = hosts.process()
    actual = {"gathered": [hosts.gather("numbers", number + i) for i in range(4)]}
    actual["first"] = hosts.broadcast_from_first("first", {"of": number})

    def fail_in_one() -> int:
        if number == 1:
            raise UserError("not the number one")
        return number

    try:
        hosts.run_on_all("work", fail_in_one)
    except CollectiveError as error:
        actual["shared"] = [str(error), error.is_printed_here]
    actual["stopped"] = _stop_together(number)
    if number == late:
        time.sleep(3)
    else:
        try:
            hosts.gather("lunch", number, limit_seconds=1)
        except PeerTimeout as error:
            actual["late"] = str(error)
    # In one write: with unbuffered output, print writes the newline separately, after another process' line.
    sys.stderr.write(json.dumps(actual) + "\n")
    sys.stderr.flush()
    if number == 0:  # the coordinator leaves last
        time.sleep(5)
    os._exit(0)  # without the shutdown barrier, which would wait for the late process


def _stop_together(number: int) -> int:
    """Returns the step at which processes stop if one of them requests it at its 30th step; all run
    freely.
    """
    with StopAgreement() as agreement:
        for step in range(1, 100_000):
            time.sleep(0.001 * (number + 1))
            if number == 2 and step == 30:
                agreement.propose("enough")
            if agreement.reached(step):
                return step
    raise AssertionError("nobody stopped it")


if __name__ == "__main__":
    main(int(sys.argv[1]))
