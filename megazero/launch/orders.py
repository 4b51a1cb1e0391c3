"""The orders of a node: its processes, their environment, and the signals that are passed on to them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from megazero.launch.channel import Message
from megazero.launch.environment import visible_devices
from megazero.launch.job import MARK, HostOptions, Job, Process, processes_of
from megazero.launch.ranks import threads_of_each
from megazero.launch.secret import SECRET

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the ranks."""
ASKS_TO_SAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals after which ranks may take the save grace; after other signals they have the grace."""


@dataclass(frozen=True)
class Orders:
    """A node's part of a launch: the content of the message "start"."""

    processes: tuple[Process, ...]
    slots: tuple[int, ...]
    folder: str
    options: HostOptions
    grace: float
    save_grace: float


def orders_of(job: Job, node: int, master: tuple[str, int], attempt: int = 0) -> Orders:
    """The orders of a node of a job."""
    return Orders(
        processes_of(job, node, master, attempt),
        job.hosts[node].slots,
        job.script.folder,
        job.options,
        job.timeouts.grace,
        job.timeouts.save_grace,
    )


def orders_from(message: Message) -> Orders:
    """The orders in a message."""
    processes = [Process(**{**part, "words": tuple(part["words"])}) for part in message["processes"]]
    options = message["options"]
    return Orders(
        tuple(processes),
        tuple(message["slots"]),
        message["folder"],
        HostOptions(**{**options, "cores": options["cores"] and tuple(options["cores"])}),
        message["grace"],
        message["save_grace"],
    )


def host_environment(
    environment: Mapping[str, str], slots: tuple[int, ...]
) -> tuple[dict[str, str], list[str]]:
    """The host's own variables for its ranks, and notices about them.

    Left out are variables of an enclosing launch, torchrun's PET_*, which would change what it starts, and
    the secret of the nodes.

    Raises:
        ConfigError: a slot is not among the host's visible devices.
    """
    stray = sorted(name for name in environment if name.startswith("PET_"))
    own = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("PET_", "TORCHELASTIC_")) and name not in (MARK, SECRET, "RANK", "LOCAL_RANK")
    }
    devices, note = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), slots)
    own["CUDA_VISIBLE_DEVICES"] = devices
    own["PYTHONUNBUFFERED"] = "1"
    own.setdefault("OMP_NUM_THREADS", str(threads_of_each(len(slots))))
    notes = [note] if note else []
    if stray:
        notes.append(f"{', '.join(stray)} would change a launch by torchrun and are left out")
    return own, notes
