"""One of several processes, in which process 0 assigns work. usage: ordered.py HOW_IT_ENDS"""

import json
import os
import sys
import time

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError, PeerLost, PeerTimeout
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.parallel.processes.remote_work import coordinator, serve_work


def main(how: str) -> None:
    output = {}
    try:
        with hosts.joined(find_process_group(os.environ), limit_seconds=60):
            if hosts.is_first():
                with coordinator("any", limit_seconds=2.0) as orders:
                    _lead(orders, output, how)
            else:
                # Process 0 takes longer than its own limit for results.
                serve_work("any", _work, num_threads=2)
    except (PeerTimeout, PeerLost, CollectiveError) as error:
        output |= {
            type(error).__name__: str(error),
            "is_printed_here": getattr(error, "is_printed_here", None),
        }
    # In one write: with unbuffered output, print writes the newline separately, after another process' line.
    sys.stderr.write(json.dumps(output) + "\n")
    sys.stderr.flush()
    if hosts.is_first():  # the coordinator leaves last
        time.sleep(6)
    os._exit(0)


def _lead(orders, output, how):
    numbers = [(process, orders.submit(process, i)) for i in range(40) for process in (1, 2)]
    output["squares"] = [orders.result(*number) for number in numbers]
    time.sleep(3)
    if how == "late":
        orders.result(2, orders.submit(2, "sleep"))
    if how == "failure":
        orders.result(1, orders.submit(1, "seven"))
    if how == "mistake":
        raise UserError("there is no such task")


def _work(what):
    if what == "sleep":
        time.sleep(4)
        return None
    return int(what) ** 2


if __name__ == "__main__":
    main(sys.argv[1])
