"""Copies of the project, a zygote in each, and what becomes of a fault there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from proofs.mutation.faults import Fault
from proofs.mutation.nearest import START, MeasuredTest, Nearest

PATIENCE = 5.0  # a run that takes so many times as long as without a fault hangs

PRELOADED = (  # what tests import most, and what takes long to import
    "torch",
    "torch.distributed",
    "torch.nn.functional",
    "torch.utils.checkpoint",
    "numpy",
    "hypothesis",
    "hypothesis.strategies",
    "pydantic",
    "rich.console",
    "rich.progress",
    "rich.table",
    "safetensors.torch",
    "tokenizers",
    "yaml",
    "_hypothesis_pytestplugin",
    "megazero.config",  # in no package that gets faults, and imports none
)


def copy_project(root: Path, target: Path) -> None:
    """Copy what the project consists of, with the compiled modules, and without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout.decode()
    names = [name for name in listed.split("\0") if name and (root / name).is_file()]
    names += [path.relative_to(root).as_posix() for path in (root / "megazero").rglob("*.so")]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)


class Workplace:
    """One copy of the project and the zygote that runs tests in it.

    Args:
        root: the project.
        folder: of its own; made here.
        preloaded: modules that every test run finds imported; those that are not installed are left out.
    """

    def __init__(self, root: Path, folder: Path, preloaded: Sequence[str] = PRELOADED):
        self._preloaded = preloaded
        self.copy = folder / "copy"
        copy_project(root, self.copy)
        self._folder = folder
        self._process: subprocess.Popen | None = None
        self._planted = 0

    def run(self, files: list[str], tests: list[str] | None, limit: float, *, stop: bool, hits: bool) -> dict:
        """What became of a test run.

        Returns:
            ``code`` (pytest's exit status, negative for a signal, None after the limit), ``timed_out``,
            ``seconds``, and, if it came so far, ``tests`` and ``failed``, the name of the first failure.
        """
        process = self._started()
        request = {"files": files, "tests": tests, "limit": limit, "stop": stop, "hits": hits}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def try_fault(self, fault: Fault, *choices: Nearest) -> dict:
        """Plant a fault, run its tests until one fails, choice after choice, and take it away again."""
        file = self.copy / fault.path
        times = file.stat()
        self._planted += 1
        result: dict = {"found": False, "seconds": 0.0, "tests": 0}
        try:
            file.write_text(fault.faulty, encoding="utf-8")
            # A time of its own, or a compiled file of another fault of the same size would be taken for it.
            os.utime(file, (self._planted, self._planted))
            for number, choice in enumerate(choices):
                for batch in choice.batches(fault):
                    answer = self._run_batch(batch)
                    result["seconds"] = round(result["seconds"] + answer["seconds"], 2)
                    result["tests"] += len(batch)
                    if answer["code"] != 0:
                        return result | {"found": True, "by": _finder(answer), "choice": number}
            return result
        finally:
            file.write_text(fault.source, encoding="utf-8")
            os.utime(file, (times.st_atime, times.st_mtime))

    def close(self) -> None:
        """End the zygote."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(30)

    def _run_batch(self, batch: list[MeasuredTest]) -> dict:
        files = list(dict.fromkeys(test.file for test in batch))
        limit = 30.0 + PATIENCE * (START + sum(test.seconds for test in batch))
        return self.run(files, [test.name for test in batch], limit, stop=True, hits=False)

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            environment = os.environ | {
                "PYTHONPATH": str(self.copy),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "MUTANTS_FOLDER": str(self._folder / "run"),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "proofs.mutation.zygote", *self._preloaded],
                cwd=self.copy,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process


def _finder(answer: dict) -> str:
    """What found a fault: a test, the time limit, or a crash."""
    if answer["timed_out"]:
        return "time limit"
    return answer.get("failed") or f"exit status {answer['code']}"
