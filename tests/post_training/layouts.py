"""The layouts on which chats, preferences and rewards are trained, and one such training."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from functools import cache
from pathlib import Path

from megazero.config.rules.table import broken_rules
from megazero.config.tree.config import Config
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.post_training.run import post_train_on, read_task
from tests.layouts.layout import Layout
from tests.layouts.selection import covering
from tests.post_training.samples import LENGTH, config_of, make_files

COUNT = 64
KINDS = {
    "chat": ("",),
    "preference": (
        "--preference-sft-coeff 0.2",
        "--preference-loss orpo",
        "--preference-loss ipo",
        "--preference-loss simpo",
        "--preference-loss robust --preference-label-smoothing 0.1",
    ),
    "reward": ("--center-rewards-coefficient 0.05", "--reward-loss per_token"),
}
_CANCELLING = (
    *(f"rewards_{name}" for name in ("chosen", "rejected", "margins")),
    *("reward_chosen", "reward_rejected", "center"),
)
"""Differences, which may be near 0: deviations are relative to 1 or more."""


def _draw(dice: random.Random) -> Layout:
    schedule, virtual = dice.choice(
        (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1))
    )
    tp, pp, cp, dp = (dice.choice((1, 1, 2, 4)) for _ in range(4))
    experts = dice.choice(("", "", "top2", "shared"))
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        schedule=schedule if pp > 1 else "1f1b",
        virtual=virtual if pp > 1 else 1,
        zero=dice.choice((0, 1, 2, 3)),
        sequence_parallel=tp > 1 and dice.choice((False, True)),
        recompute=dice.choice(("none", "full", "selective")),
        micro_batch=dice.choice((1, 2)),
        shape=dice.choice(("gpt2", "llama")),
        untied=dice.choice((False, True)),
        layers=max(2, pp * (2 if schedule in ("interleaved", "zb-v") else 1)),
        experts=experts,
        ep=dice.choice((1, 2, 4)) if experts else 1,
        etp=dice.choice((0, 1)) if experts else 0,
        dispatcher=dice.choice(("alltoall", "allgather")) if experts else "alltoall",
        comm=dice.choice(("p2p", "a2a", "all_gather")) if cp > 1 else "p2p",
        sequence=LENGTH,
    )


def _allowed(layout: Layout) -> bool:
    """Whether no rule refuses the layout: for pairs, and for chats, which share rows."""
    config = layout.config()
    apart = config.data.model_copy(update={"reset_attention_mask": True, "reset_position_ids": True})
    both = (config, config.model_copy(update={"data": apart}))
    return not any(broken_rules(each, layout.world_size) for each in both)


@cache
def layouts() -> list[Layout]:
    """`COUNT` layouts: any two values of two settings meet, if they can on four ranks; four are of eight."""
    dice, drawn = random.Random(5), dict[Layout, None]()
    while len(drawn) < 1500:
        layout = _draw(dice)
        if 1 < layout.world_size <= 4:
            drawn[layout] = None
    larger = [
        Layout(tp=2, pp=2, cp=2, sequence=LENGTH, shape="llama", sequence_parallel=True, zero=1),
        Layout(tp=2, pp=2, dp=2, sequence=LENGTH, schedule="interleaved", virtual=2, layers=4, zero=2),
        Layout(pp=2, cp=2, dp=2, sequence=LENGTH, experts="top2", ep=4, etp=1, zero=3, comm="a2a"),
        Layout(tp=2, cp=2, dp=2, sequence=LENGTH, experts="shared", ep=2, zero=3, recompute="full"),
    ]
    return [*covering(drawn, COUNT - len(larger), allowed=_allowed), *larger]


def training(folder: Path, task: str, flags: str, layout: Layout) -> Config:
    """The configuration of a training on files of `folder`, on a layout."""
    ranks, drawn = layout.world_size, layout.config()
    own = ("--epochs", 1, "--metrics-jsonl", folder / "m.jsonl")
    config = config_of(folder, task, *own, *flags.split())
    model = drawn.model.model_copy(update={"vocab_size": None, "make_vocab_size_divisible_by": 4})
    sections = {name: getattr(drawn, name) for name in ("parallel", "zero", "recompute", "batch")}
    assert ranks == layout.grid.world_size
    return config.model_copy(update={"model": model, **sections})


def trained(folder: Path, task: str, flags: str, layout: Layout) -> list[dict[str, float]]:
    """The losses and norms of all steps and evaluations; preferences are scored by each layout anew."""
    config, ranks = training(folder, task, flags, layout), layout.world_size
    for old in (*folder.glob("*.reference-*.npz"), *folder.glob("m.*jsonl")):
        old.unlink()
    own = read_task(config)
    if ranks == 1:
        post_train_on(config, solo_context(), own)
    else:
        world = ThreadWorld(ranks, 300.0)
        world.run(lambda rank: post_train_on(config, thread_context(world, layout.grid, rank), deepcopy(own)))
    lines = [line for name in ("m", "m.eval") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    # Of preferences no accuracies: at first policy and reference are equal, but for rounding.
    shown = ("_loss", "grad_norm", "accuracy", *_CANCELLING)
    return [
        {key: value for key, value in json.loads(line).items() if any(name in key for name in shown)}
        for line in lines
    ]


def files_for(folder: Path) -> Path:
    """The files of all trainings; margins are left out, which not every loss of rewards has."""
    make_files(folder)
    for name in ("pairs", "valid"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        lines = (json.dumps({**row, "margin": 0.0} if "margin" in row else row) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def deviation(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> tuple[float, str]:
    """The largest relative difference, and of which figure."""
    gaps = [
        (
            abs(a[key] - b[key]) / max(abs(b[key]), 1.0 if key.startswith(_CANCELLING) else 1e-3),
            f"{key}, {i}",
        )
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for key in b
        if isinstance(b[key], float)
    ]
    assert len(gaps) >= len(theirs), theirs
    return max(gaps)
