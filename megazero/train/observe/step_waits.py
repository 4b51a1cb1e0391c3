"""Looks for calls that make the host wait for the device during steps, and reports each place once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from megazero.mpu.host_waits import host_waits


class StepWaits:
    """Watches steps from the second one on: the first allocates, opens communicators and may compile.

    Args:
        mode: what to do about a wait that a step must not make.
        device: the device of the training.
        message: takes a line for each place.
    """

    def __init__(
        self,
        mode: Literal["off", "warn", "error"],
        device: torch.device,
        message: Callable[[str], None],
    ):
        self.mode = mode
        self.device = device
        self.message = message
        self._began = False
        self._reported: set[tuple[str, str]] = set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch what runs within it.

        Raises:
            HostWaitError: in the mode ``error``, for the first such call.
        """
        if self.mode == "off" or not self._began:
            self._began = True
            yield
            return
        with host_waits(self.device, refuses=self.mode == "error") as waits:
            yield
        for where, what in waits:
            if (where, what) not in self._reported:
                self._reported.add((where, what))
                self.message(f"host waits | {where} {what}")
