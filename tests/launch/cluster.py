"""Several "hosts" on this machine: sshd instances on loopback ports, with their own keys and
configuration.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megazero.launch.job import MARK
from tests.source_tree import ROOT

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
WHY_NOT = "needs sshd and ssh: apt-get install openssh-server"


def has_sshd() -> bool:
    return SSHD is not None and shutil.which("ssh") is not None


class Cluster:
    """Hosts w-0, w-1, ...; `ssh -F CONFIG w-1` reaches the second."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.config = folder, folder / "ssh_config"
        self.names = [f"w-{number}" for number in range(size)]
        self.servers: dict[str, subprocess.Popen] = {}
        self.launches: list[subprocess.Popen] = []
        self.ports = dict(zip(self.names, free_ports(size), strict=True))
        for name in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self.config.write_text(
            "".join(f"Host {name}\n  Port {port}\n" for name, port in self.ports.items())
            + f"Host *\n  HostName 127.0.0.1\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        for name in self.names:
            self.start(name)

    def start(self, name: str, more: str = "") -> None:
        """Start a host's sshd, with more lines in its configuration, and wait until it answers."""
        config = self.folder / f"{name}.sshd"
        config.write_text(
            f"Port {self.ports[name]}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\n{more}"
        )
        log = (self.folder / f"{name}.log").open("ab")
        self.servers[name] = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)], stderr=log)
        log.close()
        until(lambda: answers(self.ports[name]), 5)

    def stop(self, name: str) -> None:
        """End a host's sshd; connections that it has made go on."""
        server = self.servers.pop(name)
        server.kill()
        server.wait()

    def hostfile(self, slots: int | Sequence[int] = 2) -> str:
        """The path of a hostfile of all hosts."""
        counts = [slots] * len(self.names) if isinstance(slots, int) else slots
        path = self.folder / "hostfile"
        path.write_text("".join(f"{n} slots={c}\n" for n, c in zip(self.names, counts, strict=True)))
        return str(path)

    def launch(self, *words: str, cwd: Path | None = None, **variables: str) -> Launch:
        """A running `megazero launch` that reaches the hosts."""
        option = "--ssh-args" if "torchrun" in words else "--launcher-args"
        return self.begin([option, f"-F {self.config}", *words], cwd=cwd, **variables)

    def begin(self, words: Sequence[str], cwd: Path | None = None, **variables: str) -> Launch:
        """A running `megazero launch` with these words alone."""
        launch = Launch(words, cwd or self.folder, variables)
        self.launches.append(launch)
        return launch

    def close(self) -> None:
        for launch in self.launches:
            if launch.poll() is None:
                launch.kill()
                launch.wait()
        for name in list(self.servers):
            self.stop(name)


class Launch(subprocess.Popen):
    """A launch whose output goes to files."""

    def __init__(self, words: Sequence[str], cwd: Path, variables: Mapping[str, str]) -> None:
        self.out, self.err = cwd / f"out-{time.monotonic_ns()}", cwd / f"err-{time.monotonic_ns()}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        environment |= variables
        with self.out.open("wb") as out, self.err.open("wb") as err:
            super().__init__(
                [sys.executable, "-m", "megazero.cli", "launch", *words],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def lines(self) -> list[str]:
        """What has been printed so far."""
        return self.out.read_text(errors="replace").splitlines()

    def notices(self) -> str:
        """What has been printed to standard error so far."""
        return self.err.read_text(errors="replace")

    def await_lines(self, count: int, word: str = "", seconds: float = 30) -> list[str]:
        """The lines with a word in them, once there are so many."""
        until(lambda: len([line for line in self.lines() if word in line]) >= count, seconds, self.notices)
        return [line for line in self.lines() if word in line]

    def status(self, seconds: float = 60) -> int:
        """The exit status; a launch that does not end in time fails the test with what it said."""
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.notices()}\n{self.lines()[-20:]}") from None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def until(done, seconds: float, story=lambda: "") -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not so within {seconds} s: {story()}"
        time.sleep(0.02)


def processes_of(word: str) -> Iterator[int]:
    """The processes whose command line or launch mark has a word in it."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marks = [v for v in (path / "environ").read_bytes().split(b"\0") if v.startswith(MARK.encode())]
            if (word in command or any(word.encode() in mark for mark in marks)) and int(
                path.name
            ) != os.getpid():
                yield int(path.name)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def freeze(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
