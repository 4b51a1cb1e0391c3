"""Processes that start in milliseconds: a server that has loaded torch and megazero forks them.

A fresh interpreter takes two to three seconds of a core to load torch. `fork_server` is for functions;
`run` and `run_ranks` are for command lines: they do what ``python PROGRAM ARGUMENTS`` does, from where the
interpreter has started. Tests of that start itself, of imports, memory or `torchrun`, take `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.process
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess

from megazero.train.observe import host

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 240.0
PRELOADED = [
    "torch",
    "sympy",
    "torch._dynamo",  # an optimizer of torch imports it
    "numpy.random",
    "megazero.deepspeed.initialize",
    "megazero.train.pretraining",
    "megazero.verify.run",
    "tests.pool",
]


def fork_server() -> ForkServerContext:
    """The context of processes that are forked from a server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_unseen(process: ForkServerProcess) -> None:
    """Start a process of the suite's own, which tests of other processes do not find among theirs."""
    process.start()
    multiprocessing.process._children.discard(process)


class Command:
    """A command line under way, from the root of the project.

    Args:
        arguments: what follows ``python``: a script, ``-m`` and a module, or ``-c`` and code, and its flags.
        environment: is added to this process's.
    """

    def __init__(self, arguments: Sequence[object], environment: Mapping[str, object] | None = None):
        self._words = [str(word) for word in arguments]
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._output = [Path(self._folder.name) / name for name in ("out", "err")]
        added = {name: str(value) for name, value in (environment or {}).items()}
        work = (self._words, {**os.environ, **added}, self._output)
        self._process: ForkServerProcess = fork_server().Process(target=_become, args=work)
        start_unseen(self._process)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return not self._process.is_alive()

    def result(self, seconds: float = PATIENCE) -> CompletedProcess[str]:
        """Its status and output, when it has ended; after so many seconds it is killed."""
        self._process.join(seconds)
        if not self.ended:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text() if path.exists() else "" for path in self._output)
        self._folder.cleanup()
        return CompletedProcess(self._words, self._process.exitcode, out, err)


def run(*arguments: object, environment: Mapping[str, object] | None = None) -> CompletedProcess[str]:
    """The result of a command line."""
    return Command(arguments, environment).result()


def start_ranks(
    *arguments: Sequence[object], environment: Mapping[str, object] | None = None
) -> list[Command]:
    """A job with a rank for each of the command lines; they find each other as those of `torchrun` do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": len(arguments), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job |= environment or {}
    return [Command(words, {**job, "RANK": i, "LOCAL_RANK": i}) for i, words in enumerate(arguments)]


def run_ranks(
    *arguments: Sequence[object], environment: Mapping[str, object] | None = None
) -> list[CompletedProcess[str]]:
    """The results of `start_ranks`."""
    return [rank.result() for rank in start_ranks(*arguments, environment=environment)]


def _become(words: list[str], environment: dict[str, str], output: list[Path]) -> None:
    """In the fork: run the command line to its end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    tempfile.tempdir = None  # as the new environment says
    host._product_seconds = lambda left, right: 0.02  # each of a job's ranks would time products
    for number, path in zip((1, 2), output, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a fork of multiprocessing leaves them out
