"""The command blocks of README and guides: collected in reading order, and run in a checkout of their own."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.commands import PROGRAMS, words_of
from tests.docs.pages import ROOT, Block, Document

LISTED = re.compile(r"^\| \[[^\]]*\]\((\w+\.md)\)", re.MULTILINE)
LEFT = ("out", "runs", "build", "dist", "__pycache__", ".git", ".venv", ".wheels")
"""What a checkout does without: what was made in this one, and what is no part of it."""
BACKGROUND = re.compile(r"(?<!&)&[ \t]*$", re.MULTILINE)
WAIT = '\nfor job in "${started[@]}"; do wait "$job"; done\n'
SHELLS = ("bash", "sh", "console")


@dataclass(frozen=True)
class Otherwise:
    """A block that is not run as it stands: one with `text` in it.

    `instead` takes the place of `text`; None leaves the whole block out.
    """

    text: str
    reason: str
    instead: str | None = None

    def applies_to(self, block: Block) -> bool:
        """Whether it is about this block."""
        return self.text in plain(block.text)


@dataclass(frozen=True)
class Ran:
    """A block that was run, or left out: how it went, and its seconds by the clock and of processors."""

    place: str
    seconds: float
    worked: float
    how: str
    failed: bool = False


def reading_order() -> list[Document]:
    """README.md, and the guides as the page that lists them has them."""
    guides = ROOT / "docs/guides"
    listed = LISTED.findall((guides / "index.md").read_text(encoding="utf-8"))
    return [Document.read(path) for path in [ROOT / "README.md", *(guides / name for name in listed)]]


def plain(text: str) -> str:
    """The text with each command on one line."""
    return re.sub(r"\\\n\s*", "", text)


def command_blocks(document: Document) -> list[Block]:
    """The blocks of a page that a reader would type, from its first to its last.

    Those are fenced ones of a shell, and others whose first line begins with a program of ours. Of a
    block with prompts only the lines behind prompts are typed.
    """
    blocks = []
    for block in sorted(document.blocks(), key=lambda block: block.line):
        typed = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        text = "\n".join(typed) + "\n" if typed else block.text
        first = words_of(plain(text).strip().split("\n", 1)[0])
        if block.language in SHELLS or (not block.language and first and first[0] in PROGRAMS):
            blocks.append(Block(block.language, text, block.line))
    return blocks


def script_of(block: Block, rows: Sequence[Otherwise]) -> tuple[str | None, str]:
    """What is run of a block, and how it differs from the page; nothing if a row leaves it out."""
    text, how = plain(block.text), []
    for row in rows:
        if row.applies_to(block):
            if row.instead is None:
                return None, f"left out: {row.reason}"
            text = text.replace(row.text, row.instead)
            how.append(f"changed: {row.reason}")
    return text, "; ".join(how) or "as it stands"


def make_checkout(folder: Path) -> Path:
    """Copy the repository to `folder`, without what has been made in it except for compiled parts."""
    top = str(ROOT)

    def left(place: str, names: list[str]) -> set[str]:
        outer = set(LEFT) if place == top else {"__pycache__"}
        return {name for name in names if name in outer or name.endswith("_cache")}

    return Path(shutil.copytree(ROOT, folder, ignore=left, symlinks=True))


def environment(checkout: Path) -> dict[str, str]:
    """The variables of a reader who has activated an environment, and has no network."""
    own = ("PYTEST_", "SETUP_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {
        "PATH": programs,
        "PYTHONPATH": str(checkout),
        "SETUP_SKIP": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_script(text: str, checkout: Path, seconds: float) -> tuple[int, str]:
    """Run lines as bash would, each of which must succeed; return the status and what was printed.

    So must each line that goes to the background: it is waited for by its process, since bash no longer
    lists a job that ended early. Status 124 says that the time was up. What a block leaves running is ended.
    """
    log = checkout / "block.log"
    script = "started=()\n" + BACKGROUND.sub("& started+=($!)", text) + WAIT
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=checkout,
            env=environment(checkout),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            end(process)
    return status, log.read_text(encoding="utf-8", errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a block's shell, and whatever else is left of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_blocks(
    pages: Sequence[Document], rows: Sequence[Otherwise], checkout: Path, seconds: float
) -> list[Ran]:
    """Run the blocks of pages one after the other in one checkout, since they build on each other.

    Each is printed when it is over, with its seconds, and with its output if it failed.
    """
    ran = []
    for page in pages:
        for block in command_blocks(page):
            script, how = script_of(block, rows)
            begun, worked, status, output = time.monotonic(), processor_seconds(), 0, ""
            if script is not None:
                status, output = run_script(script, checkout, seconds)
            if status:
                how = f"FAILED with status {status} ({how})\n{block.text}{output[-6000:]}"
            took = time.monotonic() - begun, processor_seconds() - worked
            ran.append(Ran(f"{page.path}:{block.line}", *took, how, status != 0))
            print(f"{took[0]:7.1f} s, of processors {took[1]:6.1f} s  {ran[-1].place}  {how}", flush=True)
    return ran


def processor_seconds() -> float:
    """What processes that this one has started and seen end have used of processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_by_page(ran: Sequence[Ran]) -> dict[str, tuple[float, float]]:
    """What the blocks of each page took together, by the clock and of processors."""
    total: dict[str, tuple[float, float]] = {}
    for block in ran:
        page = block.place.rpartition(":")[0]
        clock, worked = total.get(page, (0.0, 0.0))
        total[page] = clock + block.seconds, worked + block.worked
    return total
