"""One of several processes, of which process 0 gives orders. usage: ordered.py HOW_IT_ENDS"""

import json
import os
import sys
import time

from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Late, Lost, Shared
from zaya_jax.parallel.orders import giving_orders, obey
from zaya_jax.parallel.process_group import find_process_group


def main(how: str) -> None:
    said = {}
    try:
        with hosts.joined(find_process_group(os.environ), limit_seconds=60):
            if hosts.is_first():
                with giving_orders("any", limit_seconds=2.0) as orders:
                    _lead(orders, said, how)
            else:
                # Shorter than what process 0 takes: it gives signs of life.
                obey("any", _work, num_threads=2, limit_seconds=2.0)
    except (Late, Lost, Shared) as error:
        said |= {type(error).__name__: str(error), "is_told_here": getattr(error, "is_told_here", None)}
    # In one piece: unbuffered, print writes a line's end apart, behind another process' line.
    sys.stderr.write(json.dumps(said) + "\n")
    sys.stderr.flush()
    if hosts.is_first():  # the one that all others hang on leaves last
        time.sleep(6)
    os._exit(0)


def _lead(orders, said, how):
    numbers = [(process, orders.give(process, i)) for i in range(40) for process in (1, 2)]
    said["squares"] = [orders.answer(*number) for number in numbers]
    time.sleep(3)
    if how == "late":
        orders.answer(2, orders.give(2, "sleep"))
    if how == "failure":
        orders.answer(1, orders.give(1, "seven"))
    if how == "mistake":
        raise ValueError("there is no such task")


def _work(what):
    if what == "sleep":
        time.sleep(4)
        return None
    return int(what) ** 2


if __name__ == "__main__":
    main(sys.argv[1])
