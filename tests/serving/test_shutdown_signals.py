"""The second SIGTERM or SIGINT ends a server process, even if its event loop hangs."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, sys, time
from zaya_jax.serving import shutdown_signals

async def main():
    shutdown_requested = shutdown_signals.count_signals(asyncio.get_running_loop(), forced_seconds=0.5)
    print("ready", flush=True)
    if sys.argv[1] == "hangs":
        time.sleep(300)
    if sys.argv[1] == "computes":
        while True:
            pass
    await shutdown_requested.acquire()
    print("drains", flush=True)
    await shutdown_requested.acquire()

asyncio.run(main())
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("state", ["hangs", "computes", "waits"])
def test_a_second_signal_ends_the_process(state, second):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, state], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        if state == "waits":
            assert process.stdout.readline() == "drains\n"
            process.send_signal(second)
            assert process.wait(60) == 0
            return
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(second)
        assert process.wait(60) == 1
        assert "still busy after a second signal; ending the process" in process.stderr.read()
