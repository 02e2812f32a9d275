"""A headless Chromium, controlled by its DevTools protocol: real pointer and key events, and screenshots."""

import base64
import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import time
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
LONGEST_WAIT = 60
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "End": 35,
    "Tab": 9,
}


class Page:
    """A page of the browser: its content, screenshots, and input events."""

    def __init__(self, socket):
        self._socket, self._numbers, self.complaints = socket, itertools.count(1), []
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            reply = json.loads(self._socket.recv())
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
            self._note(reply)

    def _note(self, reply):
        if reply.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(reply["params"]["exceptionDetails"])
        if reply.get("method") == "Log.entryAdded" and reply["params"]["entry"]["level"] == "error":
            self.complaints.append(reply["params"]["entry"])

    def run(self, expression):
        """Returns the value of a JavaScript expression in the page."""
        evaluated = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in evaluated, evaluated
        return evaluated["result"].get("value")

    def wait(self, expression, seconds=LONGEST_WAIT):
        """Waits until an expression is true; after a timeout, fails with the text of the page."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression}: {self.run('document.body.innerText')[:2000]}"
            time.sleep(0.02)

    def open(self, address):
        self.ask("Page.navigate", url=address)
        self.wait(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")

    def look(self, *, width=1280, height=860, theme="light", scale=1, touch=False):
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.ask("Emulation.setTouchEmulationEnabled", enabled=touch)

    def place(self, selector):
        """Scrolls an element into view, and returns the middle of its first line."""
        return self.run(f"""(() => {{
          const element = document.querySelector({json.dumps(selector)});
          element.scrollIntoView({{ block: "nearest" }});
          const box = element.getClientRects()[0];
          return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")

    def point(self, selector):
        x, y = self.place(selector)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        x, y = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector):
        x, y = self.place(selector)
        self.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def write(self, text):
        self.ask("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
            self.ask("Input.dispatchKeyEvent", type=kind, **event, **(text if kind == "keyDown" else {}))

    def picture(self, path):
        pathlib.Path(path).write_bytes(
            base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        )


def _address(folder, process):
    end = time.monotonic() + LONGEST_WAIT
    while not (folder / "DevToolsActivePort").exists():
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        assert time.monotonic() < end, "Chromium does not begin"
        time.sleep(0.05)
    port = (folder / "DevToolsActivePort").read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=LONGEST_WAIT) as response:
        return next(each["webSocketDebuggerUrl"] for each in json.load(response) if each["type"] == "page")


@contextlib.contextmanager
def page(folder):
    """Starts a browser with a profile in `folder`, and yields its page."""
    import websocket  # of kubernetes' client

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        socket = websocket.create_connection(_address(folder, process), timeout=LONGEST_WAIT)
        with contextlib.closing(socket):
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(LONGEST_WAIT)
