"""Law 1 of post-training: chats, preferences and rewards are trained alike on every layout."""

from __future__ import annotations

from functools import cache

import pytest

from tests.layouts.layout import Layout
from tests.post_training.layouts import COUNT, KINDS, deviation, files_for, layouts, trained
from tests.post_training.samples import LENGTH

pytest.importorskip("transformers")
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with files, and a function that gives one process's figures."""
    folder = files_for(tmp_path_factory.mktemp("layouts"))

    @cache
    def by_one(task: str, flags: str, serial: Layout) -> list[dict[str, float]]:
        return trained(folder, task, flags, serial)

    return folder, by_one


@pytest.mark.slow
@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("number", range(COUNT))
def test_a_layout_trains_like_one_process(number, task, alone):
    (folder, by_one), layout = alone, layouts()[number]
    flags = KINDS[task][number % len(KINDS[task])]
    gap, figure = deviation(trained(folder, task, flags, layout), by_one(task, flags, layout.serial))
    assert gap <= TOLERANCE, f"{layout.name} {flags}: {figure}"


REWARDS_OVER_COLUMNS = (
    Layout(cp=2, comm="a2a", sequence=LENGTH),
    Layout(cp=2, tp=2, sequence_parallel=True, sequence=LENGTH),
    Layout(cp=2, pp=2, sequence=LENGTH),
    Layout(cp=2, dp=2, zero=3, sequence=LENGTH),
)


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
@pytest.mark.parametrize("flags", KINDS["reward"])
def test_ranks_that_share_sequences_train_rewards_like_one_process(number, flags, alone):
    """The last token of a row lies on one of them, and its score counts once."""
    (folder, by_one), layout = alone, REWARDS_OVER_COLUMNS[number]
    gap, figure = deviation(trained(folder, "reward", flags, layout), by_one("reward", flags, layout.serial))
    assert gap <= TOLERANCE, figure
