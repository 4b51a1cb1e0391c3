"""Small decisions of the assembly."""

from __future__ import annotations

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import solo_context
from megazero.train.parts.feeds import build_feeds
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import GLOBAL_BATCH, SEQUENCE, Layout


def test_datasets_are_as_long_as_the_training_that_is_left_needs():
    plain = Layout().config(steps=10)
    lengths = {"eval_interval": 4, "eval_iters": 2}
    config = plain.model_copy(update={"training": plain.training.model_copy(update=lengths)})
    training_plan = training_plan_of(config, 1)

    def sizes(training_plan):
        feeds = build_feeds(config, training_plan, Vocabulary(37, 40, None, None), solo_context(), 0)
        found = [len(feed.dataset) for feed in (feeds.train, feeds.valid, feeds.test)]
        feeds.train.close()
        return found

    batches = [10, 2 * 3, 2]
    assert sizes(training_plan) == [n * GLOBAL_BATCH for n in batches]
    # the steps until now were of half the size
    here = Progress(4, 2 * GLOBAL_BATCH, 2 * GLOBAL_BATCH * SEQUENCE)
    assert sizes(training_plan_of(config, 1, here)) == [n * GLOBAL_BATCH for n in (8, *batches[1:])]
