"""A server in a separate process, with a fake engine whose texts are known."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass
class Process:
    """A running server.

    Attributes:
      popen: the process.
      host: address that it listens on.
      port: port that it listens on.
      lines: lines that it printed.
    """

    popen: subprocess.Popen
    host: str
    port: int
    lines: list[str]

    @property
    def address(self):
        return f"http://{self.host}:{self.port}"

    def end(self, *, seconds=30):
        """Sends SIGTERM, and returns the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)

    @property
    def num_files(self):
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    @property
    def num_threads(self):
        return len(os.listdir(f"/proc/{self.popen.pid}/task"))

    @property
    def megabytes(self):
        for line in pathlib.Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the process has ended")


@contextlib.contextmanager
def started(command, *, seconds=300, environment=None):
    """Starts a server, yields it once it has printed its URL, and kills it at the end."""
    popen = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    lines, came = [], threading.Event()

    def read():
        for line in popen.stdout:
            lines.append(line)
            if " at http://" in line:
                came.set()
        came.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert came.wait(seconds), lines
        matches = [line for line in lines if " at http://" in line]
        assert matches, "".join(lines)
        host, port = matches[0].split(" at http://")[1].split(",")[0].rsplit(":", 1)
        yield Process(popen, host, int(port), lines)
    finally:
        popen.kill()
        popen.wait()
        reader.join()
        popen.stdout.close()


def with_fake_engine(*, limits=None, **engine):
    """Starts a server with a fake engine.

    Args:
      limits: fields of `ServingLimits`.
      engine: arguments of `FakeEngine`.
    """
    options = json.dumps({"limits": limits or {}, "engine": engine})
    return started([sys.executable, str(pathlib.Path(__file__)), options])


def main():
    """Runs the server until SIGTERM."""
    sys.path.insert(0, str(ROOT))
    from fake_engine import FakeEngine, fake_model

    from zaya_jax.serving.http.limits import ServingLimits
    from zaya_jax.serving.server import listen, run_server

    options = json.loads(sys.argv[1])
    limits = ServingLimits(**options["limits"])

    def load():
        time.sleep(0.2)
        return fake_model(FakeEngine(**options["engine"]))

    with listen("127.0.0.1", 0) as listening:
        run_server(load, listening, limits, key=None, host="127.0.0.1", origins=())


if __name__ == "__main__":
    main()
