"""Weights & Biases; it needs the wandb package and a project's name."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from megazero.account.writers import over
from megazero.train.news.tracker import Tracker

AXIS = "iteration"
"""The metric over which all others are drawn, because wandb's step cannot go back."""


class WandbMonitor(Tracker):
    """Logs to a run of Weights & Biases."""

    setting, package = "wandb_project", "wandb"
    remedy = "log in with `wandb login`"

    def begin(self, *, again: bool) -> None:
        logging = self.logging
        run = self.service.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            entity=logging.wandb_entity,
            group=logging.wandb_group,
            dir=logging.wandb_save_dir,
            config=self.facts,
            **({"id": uuid4().hex[:8], "resume": "never"} if again else {}),
        )
        self._run = over(AXIS, run)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log({**values, AXIS: iteration})

    def end(self) -> None:
        self._run.finish()
