"""`zaya aegis verify`: requests that a running run repeats its last step and compares the results bitwise."""

import pathlib
import sys
import time
from collections.abc import Sequence

from zaya_jax.checkpoint import read_config
from zaya_jax.errors import DIVERGED, UserError
from zaya_jax.options import Parser
from zaya_jax.run_folder.events import events_of, read_events
from zaya_jax.run_folder.names import AT, BEGAN, ENDS, REPLAY_REQUEST_FILE, REPLAYED
from zaya_jax.train.integrity.step_replay import REQUESTED

POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya aegis verify`; exits with 76 if the repeated step has other bits.

    Raises:
      UserError: for a run that is not running, does not keep its states, or does not answer in time.
    """
    parser = Parser(
        "aegis verify",
        "Repeat the last step of a running run on the same devices and on others, and compare all bits. It "
        "must have watch.replay=True; it reads the request when it writes its next row of metrics.",
        ("zaya aegis verify runs/tiny", "zaya aegis verify runs/tiny --timeout=3600"),
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--timeout", default=600.0, metavar="SECONDS", help="time to wait for the result")
    options = parser.parse_args(argv)
    event = request_replay(options.run, timeout=options.timeout)
    print(event["reason"])
    if event["result"] != "equal":
        sys.exit(DIVERGED)


def request_replay(run: pathlib.Path, *, timeout: float) -> dict:
    """Requests a repetition, and returns its event.

    Args:
      run: folder of the run.
      timeout: time limit in seconds.
    """
    if not read_config(run).watch.replay:
        raise UserError(
            f"{run} has watch.replay=False and keeps no state to repeat a step from; resume it with "
            "--config.watch.checksums=True --config.watch.replay=True"
        )
    last = next((e for e in reversed(read_events(run)) if e["event"] in (BEGAN, AT, *ENDS)), None)
    if last is None or last["event"] in ENDS:
        raise UserError(f"{run} is not running; start it before you verify it")
    # Before the file exists, so that the answer cannot be older than the request.
    request, began = run / REPLAY_REQUEST_FILE, time.time()
    request.touch()
    while time.time() - began < timeout:
        for event in events_of(run, since=began):
            if event["event"] == REPLAYED and event["reason"].startswith(REQUESTED):
                return event
        time.sleep(POLL_SECONDS)
    # A later attempt of the run must not answer a request that nobody waits for.
    request.unlink(missing_ok=True)
    raise UserError(f"{run} has not repeated a step within {timeout:g} s; it may be stalled, or log rarely")
