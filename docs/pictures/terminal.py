#!/usr/bin/env python3
"""Draws what commands print, as a terminal shows it: the pictures of the README and of docs/.

usage: docs/pictures/terminal.py PLIMSOLL [NAME ...]

PLIMSOLL is the built program. Every picture of PICTURES, or those that are named, is drawn again into this folder as
NAME.svg. The commands run in a scratch folder that has the repository's examples and models, on a terminal of a fixed
width; `train` needs the model of examples/get-smollm2 and a quiet minute. Only Python's standard library is needed.
"""
import fcntl
import html
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


@dataclass(frozen=True)
class Picture:
    """A command and what of its output is shown."""

    name: str
    command: str
    columns: int = 100
    exit_code: int = 0
    # Lines that "..." stands for: from one that begins with the first pattern up to one that begins with the second.
    left_out: tuple = ()


PICTURES = [
    Picture(
        "plan",
        """plimsoll plan --model llama-3.1-8b --set training.method=qlora \\
    --batch-size 1 --sequence-length 2048 --memory 12GiB --elsewhere""",
        left_out=(("this machine's speeds", "fits"),),
    ),
    Picture(
        "refused",
        """plimsoll plan --model llama-3.1-8b --batch-size 1 --sequence-length 2048 \\
    --memory 24GiB --set memory.disk_budget=0 --elsewhere""",
        exit_code=3,
        left_out=(("the peak is", "the plan needs"), ("needs ", "$")),
    ),
    Picture(
        "train",
        "plimsoll train examples/finetune-smollm2.yaml --set training.steps=6",
        left_out=(("  weights", "  in all"), ("this machine's speeds", "fits")),
    ),
    Picture("preview", "plimsoll preview examples/finetune-chat.yaml --samples 2", columns=90),
]

# A terminal is taller than anything that is printed, so that nothing scrolls away.
ROWS = 500


class Screen:
    """The cells of a terminal after some output: a character and its style in each."""

    def __init__(self, columns):
        self.columns = columns
        self.rows = [[]]
        self.continued = set()  # rows that go on in the next because the line was too long
        self.row = self.column = 0
        self.style = frozenset()

    def feed(self, text):
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|[^\x1b]", text, re.DOTALL):
            if token.startswith("\x1b["):
                self.control(token[-1], token[2:-1])
            elif token == "\n":
                self.move(self.row + 1, self.column)
            elif token == "\r":
                self.column = 0
            elif token == "\b":
                self.column = max(0, self.column - 1)
            elif token == "\t":
                self.column = min(self.columns - 1, self.column // 8 * 8 + 8)
            elif token >= " " and not token.startswith("\x1b"):
                self.put(token)

    def put(self, char):
        # A terminal begins the next row when there is something to write there, not when the row is full.
        if self.column == self.columns:
            self.continued.add(self.row)
            self.move(self.row + 1, 0)
        row = self.rows[self.row]
        row.extend([(" ", frozenset())] * (self.column + 1 - len(row)))
        row[self.column] = (char, self.style)
        self.column += 1

    def move(self, row, column):
        self.row, self.column = max(0, row), column
        self.rows.extend([] for _ in range(self.row + 1 - len(self.rows)))

    def control(self, letter, argument):
        if argument.startswith("?"):  # the cursor's looks and the like
            return
        numbers = [int(n) if n else 0 for n in argument.split(";")]
        count = max(1, numbers[0])
        if letter == "A":
            self.move(self.row - count, self.column)
        elif letter == "B":
            self.move(self.row + count, self.column)
        elif letter == "C":
            self.column = min(self.columns - 1, self.column + count)
        elif letter == "D":
            self.column = max(0, min(self.column, self.columns - 1) - count)
        elif letter == "G":
            self.column = min(self.columns, count) - 1
        elif letter == "K":
            self.erase_in_row(numbers[0])
        elif letter == "J" and numbers[0] == 0:
            self.erase_in_row(0)
            del self.rows[self.row + 1 :]
        elif letter == "m":
            self.paint(numbers)
        else:
            raise SystemExit(f"terminal.py does not know the control sequence ESC[{argument}{letter}")

    def erase_in_row(self, which):
        self.continued.discard(self.row)
        row = self.rows[self.row]
        if which == 0:
            del row[self.column :]
        elif which == 1:
            row[: self.column + 1] = [(" ", frozenset())] * min(len(row), self.column + 1)
        else:
            row.clear()

    def paint(self, numbers):
        style = set(self.style)
        for number in numbers:
            colour = {30: number - 30, 90: number - 82}.get(number // 10 * 10)
            if number == 0:
                style.clear()
            elif number == 1:
                style.add("bold")
            elif number == 2:
                style.add("dim")
            elif number == 22:
                style -= {"bold", "dim"}
            elif number == 39:
                style = {name for name in style if not name.startswith("colour")}
            elif colour is not None and colour % 10 < 8 and number != 38:
                style = {name for name in style if not name.startswith("colour")} | {f"colour{colour}"}
            else:
                raise SystemExit(f"terminal.py does not know the style {number}")
        self.style = frozenset(style)

    def lines(self):
        """The rows, those that are longer than the terminal broken between words, as a reader would like them."""
        lines, line = [], []
        for i, row in enumerate(self.rows):
            line = line + row
            # A row that ends with empty cells was filled up; what comes after it is a line of its own.
            if i in self.continued and any(char != " " for char, _ in row[-2:]):
                continue
            lines.extend(self.broken(line))
            line = []
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def broken(self, line):
        while line and line[-1][0] == " ":
            line = line[:-1]
        indent = []
        while len(line) > self.columns:
            spaces = [i for i in range(len(indent) + 1, self.columns + 1) if line[i][0] == " "]
            end = spaces[-1] if spaces else self.columns
            yield line[:end]
            indent = [(" ", frozenset())] * 4
            line = indent + line[end + (1 if spaces else 0) :]
        yield line


def printed(command, screen, folder, environment):
    """Runs the command on a terminal of the screen's size; its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, screen.columns, 0, 0))
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the last one who had the terminal has closed it
            break
        if not part:
            break
        output += part
    os.close(ours)
    text = output.decode("utf-8", "replace")
    # A reader's home is not ours, and ends of lines are the same all the same.
    screen.feed(text.replace(os.path.expanduser("~") + "/", "~/"))
    return process.wait()


def shown(picture, screen):
    """The lines of a picture: the command, then its output without what is left out."""
    dim = frozenset(["dim"])
    lines = [[(char, frozenset(["prompt"])) for char in line] for line in ("$ " + picture.command).split("\n")]
    until = None
    for line in screen.lines():
        text = "".join(char for char, _ in line)
        if until is not None and re.match(until, text):
            until = None
        if until is None:
            until = next((end for begin, end in picture.left_out if re.match(begin, text)), None)
            lines.append(line if until is None else [(char, dim) for char in "..."])
    while not lines[-1] or "".join(char for char, _ in lines[-1]) == "...":
        lines.pop()
    return lines


# The colours of a terminal: on a light page, on a dark one.
COLOURS = {
    0: ("#24292f", "#6e7681"), 1: ("#cf222e", "#ff7b72"), 2: ("#116329", "#7ee787"), 3: ("#7d4e00", "#e3b341"),
    4: ("#0969da", "#79c0ff"), 5: ("#8250df", "#d2a8ff"), 6: ("#1b7c83", "#56d4dd"), 7: ("#57606a", "#c9d1d9"),
    8: ("#57606a", "#8b949e"), 9: ("#a40e26", "#ffa198"), 10: ("#1a7f37", "#a5f3b0"), 11: ("#633c01", "#f2cc60"),
    12: ("#218bff", "#a5d6ff"), 13: ("#a475f9", "#e2c5ff"), 14: ("#3192aa", "#b3f0ff"), 15: ("#1f2328", "#ffffff"),
}
NAMED = {
    "window": ("#f6f8fa", "#0d1117"), "edge": ("#d0d7de", "#30363d"), "plain": ("#1f2328", "#e6edf3"),
    "dim": ("#656d76", "#8b949e"), "prompt": ("#0969da", "#58a6ff"),
}
CELL, LINE, MARGIN, BAR = 7.8, 18, 16, 32


def stylesheet(used):
    """The rules of the classes that a picture uses, for light pages and for dark ones."""
    pairs = {name: pair for name, pair in NAMED.items() if name in used | {"window", "edge", "plain"}}
    pairs |= {f"colour{n}": pair for n, pair in COLOURS.items() if f"colour{n}" in used}

    def rules(which):
        return " ".join(
            f".{name} {{ {'stroke' if name == 'edge' else 'fill'}: {pair[which]} }}" for name, pair in pairs.items()
        )

    font = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    return (
        f"text {{ font: 13px {font}; white-space: pre }} .bold, .prompt {{ font-weight: 600 }}\n{rules(0)}\n"
        f"@media (prefers-color-scheme: dark) {{ {rules(1)} }}"
    )


def runs(line):
    """The parts of a line that look alike: first column, style, text; blocks of a bar apart from letters."""
    parts = []
    for column, (char, style) in enumerate(line):
        kind = (style, char if char in "█░" else "")
        if parts and parts[-1][1] == kind:
            parts[-1][2].append(char)
        else:
            parts.append((column, kind, [char]))
    return [(column, style, "".join(chars)) for column, (style, _), chars in parts]


def drawn(picture, lines):
    """The picture as SVG."""
    width = 2 * MARGIN + CELL * picture.columns
    height = BAR + MARGIN + LINE * len(lines)
    title = html.escape("A terminal with the output of " + " ".join(picture.command.replace("\\\n", "").split()))
    used = {name for line in lines for _, style in line for name in style}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img">',
        f"<title>{title}</title>",
        f"<style>\n{stylesheet(used)}\n</style>",
        f'<rect class="window edge" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>',
    ]
    for i, colour in enumerate(["#ff5f57", "#febc2e", "#28c840"]):
        out.append(f'<circle cx="{MARGIN + 4 + 18 * i}" cy="17" r="5.5" fill="{colour}"/>')
    for i, line in enumerate(lines):
        base = BAR + 14 + LINE * i
        for column, style, text in runs(line):
            names = sorted(style) if any(name != "bold" for name in style) else ["plain", *sorted(style)]
            x, long, look = MARGIN + CELL * column, CELL * len(text), " ".join(names)
            if text[0] in "█░":
                faint = ' opacity="0.3"' if text[0] == "░" else ""
                out.append(f'<rect class="{look}" x="{x:.1f}" y="{base - 11}" width="{long:.1f}" height="13"{faint}/>')
                continue
            ahead = len(text) - len(text.lstrip(" "))
            text = text.strip(" ")
            if text:
                # The length is said, so that columns stand under each other in every font.
                x, long = x + CELL * ahead, CELL * len(text)
                out.append(
                    f'<text class="{look}" x="{x:.1f}" y="{base}" textLength="{long:.1f}" xml:space="preserve">'
                    f"{html.escape(text, quote=False)}</text>"
                )
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve()
    wanted = sys.argv[2:] or [picture.name for picture in PICTURES]
    if unknown := set(wanted) - {picture.name for picture in PICTURES}:
        raise SystemExit(f"there is no picture {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, programs = pathlib.Path(scratch, "work"), pathlib.Path(scratch, "bin")
        folder.mkdir()
        programs.mkdir()
        (programs / "plimsoll").symlink_to(program)
        for name in ("examples", "models"):
            (folder / name).symlink_to(REPOSITORY / name)
        environment = dict(os.environ, TERM="xterm-256color", PATH=f"{programs}:{os.environ['PATH']}")
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        # Speeds are measured once, before any picture, so that none of them waits for it.
        subprocess.run(["plimsoll", "doctor"], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        for picture in PICTURES:
            if picture.name not in wanted:
                continue
            screen = Screen(picture.columns)
            code = printed(picture.command, screen, folder, environment)
            lines = shown(picture, screen)
            if code != picture.exit_code:
                said = "\n".join("".join(char for char, _ in line) for line in lines)
                raise SystemExit(f"{picture.name}: exit code {code} and not {picture.exit_code}\n{said}")
            path = HERE / f"{picture.name}.svg"
            path.write_text(drawn(picture, lines), encoding="utf-8")
            print(f"{path.relative_to(REPOSITORY)}: {len(lines)} lines")


if __name__ == "__main__":
    main()
