"""Runs `pip install` and says how far it is: what it downloads, how large it is, how much of it has come.

    python scripts/pip_progress.py torch==2.13.0

Arguments go to `pip install`. pip's own words are shown if it fails. Needs nothing but Python, as nothing is
installed yet.
"""

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

EVERY = 10.0
"""Seconds between two reports of the same work."""
LARGE = 8e6
"""Bytes from which a download is worth a line."""
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


class Progress:
    """The state of an installation, as pip's lines and the files that it leaves tell it.

    Args:
        scratch: pip's folder for temporary files, downloads among them.
        site: where packages are installed.
    """

    def __init__(self, scratch: Path, site: Path) -> None:
        self._scratch = scratch
        self._site = site
        self._before = self._installed()
        self._downloading: tuple[str, float] | None = None
        self._installing = 0
        self._latest = "looking for packages"

    def line(self, text: str) -> str | None:
        """Take a line of pip's; return what to tell of it, if anything."""
        self._latest, self._downloading = f"pip: {text.strip()[:100]}", None
        if downloading := re.match(r"\s*Downloading (\S+) \(([\d.]+) (bytes|kB|MB|GB)", text):
            name, size, unit = downloading.groups()
            wheel, octets = name.rpartition("/")[2], float(size) * UNITS[unit]
            if octets < LARGE:
                return None
            self._downloading = (wheel, octets)
            return f"downloading {wheel}, {octets / 1e6:,.0f} MB"
        if text.startswith("Installing collected packages:"):
            self._installing = text.count(",") + 1
            return f"installing {self._installing} packages" if self._installing > 1 else None
        return None

    def now(self) -> str:
        """Return a sentence about the work under way."""
        if self._installing:
            done = min(len(self._installed() - self._before), self._installing)
            return f"installed {done} of {self._installing} packages"
        if self._downloading is not None:
            wheel, octets = self._downloading
            share = min(largest_file(self._scratch) / octets, 1.0)
            return f"downloading {wheel}: {share:.0%} of {octets / 1e6:,.0f} MB"
        return self._latest

    def _installed(self) -> set[str]:
        return {path.name for path in self._site.glob("*.dist-info")}


def largest_file(folder: Path) -> int:
    """Return the bytes of the largest file in a folder whose files come and go; 0 if there is none."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size = max(size, path.stat().st_size if path.is_file() else 0)
    return size


def say(text: str) -> None:
    """Print a line as scripts/setup.sh does."""
    print(f"setup: {text}", flush=True)


def install(arguments: Sequence[str]) -> int:
    """Run pip to its end; return its exit status."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    with tempfile.TemporaryDirectory(prefix="pip-") as scratch:
        process = subprocess.Popen(
            [*command, "--no-compile", "--progress-bar", "off", *arguments],
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        progress = Progress(Path(scratch), Path(sysconfig.get_path("purelib")))
        began, ended = time.monotonic(), threading.Event()

        def remind() -> None:
            while not ended.wait(EVERY):
                say(f"{progress.now()} ({time.monotonic() - began:.0f} s)")

        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        words = []
        assert process.stdout is not None
        for line in process.stdout:
            words.append(line)
            if (sentence := progress.line(line)) is not None:
                say(sentence)
        status = process.wait()
        ended.set()
        reminder.join()
    if status:
        sys.stderr.write("".join(words))
    return status


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
