#!/usr/bin/env python3
"""Opens pages of `plimsoll report` in a headless Chromium and reads what appears: at the pointer, by keys, in light and dark, on a
phone's width, without JavaScript, and with hostile names. Says why where there is no browser.

    docs/bench/report_check.py [--plimsoll target/release/plimsoll] [--pictures FOLDER]
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import browser

TINY = """
model:
  from_scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4}
data: {train: text.txt, validation: text.txt, sequence_length: 64}
training: {steps: 40, batch_size: 4, gradient_accumulation_steps: 1, learning_rate: 3e-3}
memory: {device_budget: 512MiB}
output: {dir: out, save_steps: 20, eval_steps: 10}
"""
HOSTILE = "</script><img src=x onerror=\"document.title='hit'\">"
UNITS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


def size(text):
    """Bytes as the page writes them."""
    number, unit = re.search(r"([\d.,]+) (B|KiB|MiB|GiB|TiB)", text).groups()
    return float(number.replace(",", "")) * 1024 ** UNITS[unit]


def about(a, b, share=0.006):
    return abs(a - b) <= share * max(a, b, 1)


class ReportChecks(browser.Checks):
    def run(self, *arguments):
        made = subprocess.run([self.program, *arguments], cwd=self.folder, capture_output=True, text=True)
        if made.returncode not in (0, 3):
            raise SystemExit(f"plimsoll {' '.join(arguments)}: {made.stderr}")
        return made.stdout

    def report(self, name, *arguments):
        page = self.folder / f"{name}.html"
        document = json.loads(self.run("report", *arguments, "-o", page.name, "--json"))
        print(f"{name}: {page.stat().st_size / 1024:.0f} KiB")
        self.holds("the page is at most 3 MiB", page.stat().st_size < 3 << 20)
        self.window.open(page)
        return page, document

    def text(self, selector):
        return self.window.script("return document.querySelector(arguments[0]).textContent", selector)

    def rows(self):
        return self.window.script(
            "return [...document.querySelectorAll('#moment-rows tr')].map(r => [...r.children].map(c => c.textContent))"
        )

    def quiet(self):
        """The console has said nothing, and nothing was asked of a network."""
        self.holds("the console is empty", self.window.log() == [])
        log = self.window.request("POST", "/se/log", {"type": "performance"})
        asked = [json.loads(entry["message"])["message"] for entry in log]
        asked = [own["params"]["request"]["url"] for own in asked if own["method"] == "Network.requestWillBeSent"]
        # Pages of the browser's own, such as the one that it starts with, are its matter.
        others = [url for url in asked if not url.startswith(("file:", "data:", "chrome:"))]
        self.holds(f"only files were opened {others}".strip(" []"), not others)

    def schemes(self, page):
        seen = {}
        for scheme in ("light", "dark"):
            self.window.scheme(scheme)
            seen[scheme] = self.window.script(
                "const s = e => getComputedStyle(document.querySelector(e));"
                "return [s('body').backgroundColor, s('body').color, s('figcaption b, h2').color]"
            )
            if self.pictures:
                for width in (1200, 390):
                    self.window.size(width, 900, width < 500)
                    self.window.picture(self.pictures / f"{page.stem}-{scheme}-{width}.png")
                self.window.size(1200, 900)
        light = lambda colour: sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765
        self.holds("a light page has dark words", light(seen["light"][0]) > 0.9 and light(seen["light"][1]) < 0.3)
        self.holds("a dark page has light words", light(seen["dark"][0]) < 0.2 and light(seen["dark"][1]) > 0.7)
        self.window.scheme("light")

    def phone(self):
        self.window.size(390, 844, True)
        wide = self.window.script("return document.documentElement.scrollWidth")
        self.holds(f"nothing is wider than a phone ({wide} of 390)", wide <= 390)
        self.window.size(1200, 900)

    def timeline(self, document):
        timeline = document["timeline"]
        device = timeline["tiers"][0]
        columns, peak = len(timeline["begins"]), device["peak_column"]
        live = lambda column: sum(of[column] for _, of in device["live"])
        planned = document["plan"]["memory"]["device"]["peak_bytes"]
        self.holds("the peak of the page is the plan's", device["peak_bytes"] == planned == device["top"][peak])
        plot = "figure.tier[data-tier='0'] svg.area"
        self.window.point(plot, 0.01)
        self.holds("another moment is another moment", "peak" not in self.text("#moment-title"))
        for column in (peak, columns // 3, columns - 1):
            self.window.point(plot, (column + 0.5) / columns, 0.7)
            title, rows = self.text("#moment-title"), self.rows()
            where = f"column {column}"
            now = int(self.window.script("return document.querySelector(arguments[0]).getAttribute('aria-valuenow')", plot))
            self.holds(f"{where}: the pointer is near ({now})", abs(now - column) <= 1)
            self.holds(f"{where}: {title}", about(size(title.split(":")[-1]), live(now)))
            self.holds(f"{where}: {len(rows)} rows make up what lives", about(sum(size(row[3]) for row in rows), live(now), 0.01))
            self.holds(f"{where}: each says since when and whose", all(row[4] and row[5] for row in rows if row[0] != "all others"))
        # By keys alone.
        self.window.script("document.querySelector(arguments[0]).focus()", plot)
        self.window.press("p")
        self.holds(f"p goes to the peak: {self.text('#moment-title')}", "at the peak" in self.text("#moment-title"))
        largest = [(row[0], row[3]) for row in self.rows() if row[0] != "all others"]
        self.holds("the still table says the same", [name for name, _ in largest] == [
            group["name"] + (f" × {group['count']:,}" if group["count"] > 1 else "") for group in document["timeline"]["at_peak"]
        ])
        self.window.press("\ue011")
        self.holds("Home goes to the beginning", self.window.script(
            "return document.querySelector(arguments[0]).getAttribute('aria-valuenow')", plot) == "0")
        self.window.press("\ue014", "\ue014")
        words = self.window.script("return document.querySelector(arguments[0]).getAttribute('aria-valuetext')", plot)
        self.holds(f"arrows go on, and words say where: {words}", re.search(r"\d.*: .*iB", words) is not None)
        slow = self.window.script(
            "const area = document.querySelector(arguments[0]), start = performance.now();"
            "for (let i = 0; i < 200; i++) area.dispatchEvent(new KeyboardEvent('keydown', {key: i % 2 ? 'ArrowLeft' : 'PageUp'}));"
            "return (performance.now() - start) / 200", plot)
        print(f"      a move of the cursor takes {slow:.2f} ms")

    def still(self, page):
        """Without JavaScript."""
        self.window.devtools("Emulation.setScriptExecutionDisabled", value=True)
        self.window.open(page)
        seen = self.window.devtools("DOM.getDocument", depth=-1)
        self.window.devtools("Emulation.setScriptExecutionDisabled", value=False)
        text = json.dumps(seen)
        self.holds("without a script there are pictures and tables", text.count('"path"') > 3 and "moment-rows" in text)
        names = page.read_text()
        self.holds("and the largest of what lives at the peak", re.search(r'id="moment-rows">\s*<tr>', names) is not None)
        self.window.open(page)


def tiny_run(checks):
    words = " ".join(f"word{i * 7 % 23}" for i in range(3000))
    (checks.folder / "text.txt").write_text(words)
    (checks.folder / "c.yaml").write_text(TINY)
    checks.run("train", "c.yaml")
    page, document = checks.report("run", "out")
    checks.timeline(document)
    for chart, pattern in (("loss", r"step 1: loss \d"), ("speed", r"step 1: [\d,]+ tokens/s"), ("memory", r"step 1: .*iB")):
        figure = f"figure[data-chart={chart}]"
        checks.window.point(f"{figure} svg.area", 0.002)
        said = checks.text(f"{figure} .readout")
        checks.holds(f"{chart} at the left edge: {said}", re.match(pattern, said) is not None)
    device = [row for row in document["compared"] if row["exact"]][0]
    checks.holds("the device took what was planned", device["planned"] == device["measured"])
    checks.holds("and the page says so", "to the byte" in checks.text(".headline"))
    checks.schemes(page)
    checks.phone()
    checks.quiet()


def large_plan(checks):
    plan = ["--model", "llama-3.1-8b", "--hardware", "rtx-4090", "--sequence-length", "2048", "--set", "training.method=qlora",
            "--set", "training.gradient_accumulation_steps=16"]
    page, document = checks.report("plan", *plan)
    checks.timeline(document)
    checks.schemes(page)
    checks.phone()
    checks.still(page)
    checks.quiet()
    checks.report("offloaded", *plan[:6], "--set", "training.method=full", "--set", "data.sequence_length=512")


def choices(checks):
    document = json.loads(checks.run("plan", "--model", "smollm2-135m", "--memory", "8GiB", "--sequence-length", "512", "--json"))
    gib = 1 << 30
    document["waterfall"] = [
        {"change": what, "bytes_saved": saved * gib // 100, "seconds_added": added, "device_peak_bytes": peak * gib // 100}
        for what, saved, added, peak in [("f32, AdamW, everything kept", 0, 0, 640), ("bfloat16", 180, -0.4, 460),
                                         ("8-bit states", 90, 0.01, 370), ("checkpointing", 190, 0.31, 180), (HOSTILE, 60, 0.9, 120)]
    ]
    document["pareto"] = [
        {"device_peak_bytes": peak * gib // 100, "step_seconds": seconds, "quality": quality,
         "config": {"training": {"batch_size": size, "optimizer": HOSTILE if size == 4 else "adamw"}}}
        for peak, seconds, quality, size in [(640, 1.1, "lossless", 8), (410, 1.3, "lossless", 4), (250, 1.7, "proven", 2),
                                             (120, 3.2, "anything", 1)]
    ]
    document["config"]["data"] = {**document["config"].get("data", {}), "train": HOSTILE}
    (checks.folder / "plan.json").write_text(json.dumps(document))
    page, _ = checks.report("choices", "plan.json")
    checks.holds("hostile names are words", HOSTILE in checks.text("#waterfall tbody") and HOSTILE in checks.text("#pareto tbody")
                 and HOSTILE in checks.text("#configuration pre"))
    checks.holds("and nothing else", "hit" not in checks.window.script("return document.title")
                 and checks.window.script("return document.images.length") == 0)
    checks.holds("the policy lets no other script run", checks.window.script(
        "const s = document.createElement('script'); s.textContent = 'window.strange = 1'; document.body.append(s); return !window.strange"))
    checks.window.log()
    points = checks.window.script("return document.querySelectorAll('#pareto .area > svg.mark').length")
    checks.holds("every choice is a point and a row", points == 4 and checks.window.script(
        "return document.querySelectorAll('#pareto tbody tr').length") == 4)
    checks.schemes(page)
    checks.phone()


def main():
    program, pictures = browser.asked(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        checks = ReportChecks(program, pathlib.Path(folder), pictures)
        try:
            tiny_run(checks)
            large_plan(checks)
            choices(checks)
        finally:
            checks.window.close()
    print(f"{checks.done} checks hold")


if __name__ == "__main__":
    sys.exit(main())
