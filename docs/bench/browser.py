"""A headless Chromium, driven by chromedriver over plain HTTP (the W3C WebDriver protocol): no package beyond Python's own."""

import argparse
import base64
import json
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing():
    """What is not on this machine, or None."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        return "there is no Chromium (apt-get install -y chromium)"
    if not shutil.which("chromedriver"):
        return "there is no chromedriver (apt-get install -y chromium-driver)"
    return None


class Browser:
    """A window. Nothing of it is left behind."""

    def __init__(self, width=1200, height=900):
        self.folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.base = f"http://127.0.0.1:{port}"
        self.wait_for_driver()
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "about:blank", "--hide-scrollbars", f"--user-data-dir={self.folder.name}", f"--window-size={width},{height}",
        ]
        browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments, "binary": browser},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self.request("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{answer['sessionId']}"

    def wait_for_driver(self):
        for _ in range(300):
            try:
                if self.request("GET", "/status")["ready"]:
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("chromedriver does not answer")

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, file):
        self.go(file.absolute().as_uri())

    def go(self, url):
        self.request("POST", "/url", {"url": url})

    def script(self, text, *arguments):
        return self.request("POST", "/execute/sync", {"script": text, "args": list(arguments)})

    def devtools(self, command, **parameters):
        return self.request("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def scheme(self, name):
        """light or dark, as a system would say it."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width, height, mobile=False):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def point(self, selector, across, down=0.5):
        """Moves the pointer to a place of an element, from 0 to 1."""
        self.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = self.script("const b = document.querySelector(arguments[0]).getBoundingClientRect();"
                          "return [b.left, b.top, b.width, b.height]", selector)
        x, y = box[0] + across * box[2], box[1] + down * box[3]
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self.request("POST", "/actions", {"actions": [pointer]})
        time.sleep(0.1)

    def press(self, *keys):
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.request("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def log(self):
        """What the console says, errors and refusals of the policy among it."""
        return self.request("POST", "/se/log", {"type": "browser"})

    def picture(self, file, full=True):
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=full,
                             **({"clip": self.whole()} if full else {}))
        file.write_bytes(base64.b64decode(shot["data"]))

    def whole(self):
        content = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": content["width"], "height": content["height"], "scale": 1}

    def close(self):
        try:
            self.request("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
            self.folder.cleanup()


def asked(about):
    """The program and the folder for pictures that the command line of a script names. Ends the script where there is no browser."""
    arguments = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plimsoll", default="target/release/plimsoll")
    arguments.add_argument("--pictures", type=pathlib.Path, help="write pictures of what appears here")
    arguments = arguments.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        raise SystemExit(0)
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    return str(pathlib.Path(arguments.plimsoll).absolute()), arguments.pictures


class Checks:
    """What a script holds of pages: each thing in a line, up to the first that is not so."""

    def __init__(self, program, folder, pictures):
        self.program, self.folder, self.pictures, self.window = program, folder, pictures, Browser()
        self.done = 0

    def holds(self, what, is_so):
        self.done += 1
        print(f"  {'ok' if is_so else 'FAILED'}  {what}")
        if not is_so:
            raise SystemExit(1)
