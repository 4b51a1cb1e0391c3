"""`megazero serve` in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass
class Started:
    """A server that runs: where, its process (or the launcher's), and the file with what it prints."""

    url: str
    process: subprocess.Popen
    log: Path

    def ranks(self) -> list[int]:
        """The processes of the ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in children.read_text().split()]

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(120)


@contextmanager
def started(folder: Path, log: Path, *flags: str, ranks: int = 1, patience: float = 300) -> Iterator[Started]:
    """Start a server at a free port on some ranks; at the end it is killed if it still runs."""
    launcher: Sequence[str] = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m")
    words = [sys.executable, "-m", *(launcher if ranks > 1 else ()), "megazero.cli", "serve", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen([*words, "--port", "0", *flags], stderr=file, stdout=file, env=environment)
    try:
        end = time.monotonic() + patience
        while not (line := re.search(r"serving .+ on (http://\S+)", log.read_text(errors="replace"))):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < end, log.read_text(errors="replace")
            time.sleep(0.2)
        yield Started(line[1], process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
