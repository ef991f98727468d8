#!/usr/bin/env python3
"""Opens the page of `plimsoll watch --serve` in a headless Chromium while two small runs are going on, and reads what appears: numbers that
move, keys and buttons, light and dark, a phone's width, a folder with a hostile name, and a watcher that is stopped. Says why where there is
no browser.

    docs/bench/watch_check.py [--plimsoll target/release/plimsoll] [--pictures FOLDER]
"""

import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import browser

TINY = """
model:
  from_scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4}
data: {train: text.txt, validation: text.txt, sequence_length: 64}
training: {steps: 1000000, batch_size: 4, gradient_accumulation_steps: 1, learning_rate: 3e-3}
memory: {device_budget: 512MiB}
output: {dir: out, save_steps: 400, save_total_limit: 2, eval_steps: 200}
"""
OFFLOADED = ["--set", "memory.offload.optimizer=disk", "--set", "memory.disk_path=spill"]
HOSTILE = "<img src=x onerror=document.title='hit'>"


class WatchChecks(browser.Checks):
    def __init__(self, program, folder, pictures):
        super().__init__(program, folder, pictures)
        self.started = []

    def start(self, *arguments, **more):
        process = subprocess.Popen([self.program, *arguments], cwd=self.folder, text=True, **more)
        self.started.append(process)
        return process

    def train(self, output, *more):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return self.start("train", "c.yaml", "--set", f"output.dir={json.dumps(output)}", *more, **quiet)

    def serve(self, *runs, at="127.0.0.1:0"):
        watcher = self.start("watch", *runs, "--serve", at, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return watcher, watcher.stdout.readline().strip()

    def script(self, text, *arguments):
        return self.window.script(text, *arguments)

    def words(self, selector):
        return self.script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent.trim())", selector)

    def until(self, what, happens, seconds=90):
        end = time.time() + seconds
        while time.time() < end:
            if happens():
                return self.holds(what, True)
            time.sleep(0.25)
        self.holds(what, False)

    def end(self):
        for process in self.started:
            process.kill()
            process.wait()
        self.window.close()


def steps(checks):
    """The step of each run, as the page shows it."""
    facts = checks.script("return [...document.querySelectorAll('article')].map(a => a.querySelector('.facts dd').textContent)")
    return [int(text.replace(",", "")) for text in facts]


def live(checks):
    runs = [checks.train("out"), checks.train("away", *OFFLOADED), checks.train(HOSTILE)]
    folders = ["out", "away", HOSTILE]
    for name in folders:
        for _ in range(600):
            if (checks.folder / name / "metrics.jsonl").exists():
                break
            time.sleep(0.1)
    watcher, url = checks.serve(*folders)
    checks.holds(f"it is served on the loopback: {url}", re.fullmatch(r"http://127\.0\.0\.1:\d+/", url) is not None)
    checks.window.go(url)
    checks.until("three runs stand side by side", lambda: len(checks.words("article")) == 3)
    checks.until("the plans are there", lambda: len(checks.words(".tier .peak-words")) == 3)
    seen = steps(checks)
    checks.until("steps go on", lambda: all(now > before for now, before in zip(steps(checks), seen)))
    checks.holds("the runs are running", [text.split()[0] for text in checks.words(".state")] == ["running"] * 3)
    titles = checks.words("article:first-child figcaption b")
    checks.holds(f"there are {', '.join(titles)}", titles == ["Loss", "Speed", "Learning rate", "Memory by owner", "Device"])
    owners = checks.words("article:first-child .band-of-memory .legend li")
    checks.holds("memory is told by owner", any(text.startswith("weights ") for text in owners) and any(text.startswith("program ") for text in owners))
    checks.until("I/O is told with the share that is hidden", lambda: any(re.search(r"[\d.]+ % of its time hidden", text) for text in checks.words(".io")))
    checks.until("events are told", lambda: any("saved" in text for text in checks.words(".events li")) and any("validation loss" in text for text in checks.words(".events li")))
    checks.holds("a hostile name is words", HOSTILE in checks.words(".folder")[2] and checks.script("return document.title") != "hit"
                 and checks.script("return document.images.length") == 0)
    checks.holds("the policy lets no other script run", checks.script(
        "const s = document.createElement('script'); s.textContent = 'window.strange = 1'; document.body.append(s); s.remove(); return !window.strange"))
    checks.window.log()
    pause_and_zoom(checks)
    looks(checks)
    log = [entry for entry in checks.window.log() if "favicon" not in entry["message"]]
    checks.holds(f"the console is empty {log}".strip(" []"), not log)
    asked = [json.loads(entry["message"])["message"] for entry in checks.window.request("POST", "/se/log", {"type": "performance"})]
    asked = {own["params"]["request"]["url"] for own in asked if own["method"] == "Network.requestWillBeSent"}
    others = {own for own in asked if not own.startswith((url, "data:", "chrome", "about:"))}
    checks.holds(f"nothing but this server was asked {others or ''}".strip(), not others)
    return runs, watcher


def pause_and_zoom(checks):
    checks.window.press("p")
    paused = steps(checks)
    time.sleep(2.5)
    checks.holds("p holds the page still", steps(checks) == paused and checks.words("#pause") == ["Go on"])
    checks.script("document.querySelector('#pause').click()")
    checks.until("and the button lets it go on", lambda: steps(checks) != paused)
    checks.window.press("+", "+")
    checks.holds("+ zooms", checks.words("#zoom") == ["last 300 steps"])
    columns = "return Math.max(...[...document.querySelectorAll('figure[data-chart=loss] .plot')].map(p => +p.dataset.columns))"
    checks.until("to the last steps alone", lambda: 2 < checks.script(columns) <= 300)
    checks.window.press("-", "-", "-")
    checks.holds("- goes back to all", checks.words("#zoom") == ["all steps"])
    checks.window.press("?")
    checks.holds("? tells the keys", not checks.script("return document.querySelector('#keys').hidden"))
    checks.window.press("?")


def looks(checks):
    light = lambda colour: sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765
    for scheme in ("light", "dark"):
        checks.window.scheme(scheme)
        ground, ink = checks.script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        checks.holds(f"a {scheme} page is {scheme}", (light(ground) > 0.9 and light(ink) < 0.3) == (scheme == "light"))
        for width in (1500, 390):
            checks.window.size(width, 900, width < 500)
            time.sleep(1.5)
            wide = checks.script("return document.documentElement.scrollWidth")
            checks.holds(f"nothing is wider than {width} ({wide})", wide <= width)
            if checks.pictures:
                checks.window.picture(checks.pictures / f"watch-{scheme}-{width}.png")
        checks.window.size(1500, 900)
    checks.window.scheme("light")


def ends(checks, runs, watcher):
    runs[0].send_signal(signal.SIGTERM)
    runs[0].wait()
    checks.until("a run that was stopped is told so", lambda: checks.words(".state")[0] == "stopped")
    runs[2].kill()
    runs[2].wait()
    checks.until("a run that was killed is told to be silent", lambda: checks.words(".state")[2].startswith("silent for"))
    watcher.send_signal(signal.SIGINT)
    checks.holds("Ctrl-C ends the watcher", watcher.wait() == 130)
    checks.until("the page says that nobody answers", lambda: "does not answer" in checks.words("#connection")[0])
    checks.holds("and the run goes on", runs[1].poll() is None)


def token(checks):
    watcher, url = checks.serve("out", at="0.0.0.0:0")
    port, secret = re.fullmatch(r"http://0\.0\.0\.0:(\d+)/\?token=([0-9a-f]{32})", url).groups()
    here = f"http://127.0.0.1:{port}/"

    def answered(address):
        try:
            with urllib.request.urlopen(address) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    checks.holds("without the token nothing is told", [answered(here), answered(here + "runs"), answered(here + "?token=0")] == [401] * 3)
    checks.window.go(f"{here}?token={secret}")
    checks.until("with it the page is there and asks with it", lambda: len(checks.words("article")) == 1)
    watcher.kill()


def main():
    program, pictures = browser.asked(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "text.txt").write_text(" ".join(f"word{i * 7 % 23}" for i in range(3000)))
        (folder / "c.yaml").write_text(TINY)
        checks = WatchChecks(program, folder, pictures)
        try:
            runs, watcher = live(checks)
            ends(checks, runs, watcher)
            token(checks)
        finally:
            checks.end()
    print(f"{checks.done} checks hold")


if __name__ == "__main__":
    sys.exit(main())
