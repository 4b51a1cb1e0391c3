"""One rank was started with another setting, or other data."""

from __future__ import annotations

from pathlib import Path

from proofs.fault_matrix.cases.case import (
    BASE,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.runs import Outcome, Setting, train, write_text


def settings_that_differ() -> list[FaultCase]:
    """One rank was started with another setting, or other data."""
    changes = {
        "lr": "--lr 2e-2",
        "seed": "--seed 8",
        "adam_beta2": "--adam-beta2 0.9",
        "clip_grad": "--clip-grad 2",
        "hidden_dropout": "--hidden-dropout 0.1",
        "weight_decay": "--weight-decay 0.5",
        "train_iters": "--train-iters 35",
    }
    layouts = [Setting.of(dp=2), Setting.of(tp=2), Setting.of(pp=2), Setting.of(dp=2, stage=3)]
    found = []
    for number, (name, flags) in enumerate(changes.items()):
        where = layouts[number % len(layouts)]
        found.append(
            FaultCase(
                "settings",
                f"another {name} on rank 1, {where.name}",
                lambda folder, where=where, flags=flags: train(where, folder, BASE, flags_of={1: flags}),
                Expected(2, (rf"`{name}` must be the same on all ranks, but is .* on rank 1",), kinds=()),
                quick=number < 2,
            )
        )

    def other_data(folder: Path) -> Outcome:
        other = write_text(folder.parent / "other", 44_000)
        return train(Setting.of(dp=3), folder, BASE, flags_of={2: f"--data-path {other}"})

    told = (r"`training data` must be the same on all ranks, but is .* on ranks 0-1, .* on rank 2",)
    found.append(FaultCase("settings", "other data on rank 2, D3", other_data, Expected(2, told), quick=True))
    return found
