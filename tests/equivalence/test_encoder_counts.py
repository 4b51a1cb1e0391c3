"""Two losses with two counts: each is the mean over the global batch, whatever a micro-batch holds.

The expected losses and gradients are those of `tests/models/plain_bert.py` in float64, which sees one
sample at a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from megazero.config.steps import Step
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.models.bert_batch import BertCollate
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.verify.record import Record, record_steps, verification_engine
from megazero.verify.run import run_in_threads
from tests.layouts.layout import VOCABULARY, Layout
from tests.models.bert_samples import samples, taken
from tests.models.plain_bert import PlainBert
from tests.tables import over_table

WIDTH = 32


def configure(layout: Layout) -> Config:
    """Gradients as they are: nothing is clipped."""
    config = layout.config()
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"seq_length": WIDTH}),
            "optimizer": config.optimizer.model_copy(update={"clip_grad": 0.0}),
        }
    )


def batches(config: Config, arrays, context: ParallelContext, step: Step) -> list:
    """This rank's share of the samples, in micro-batches."""
    size, count = config.batch.micro_batch_size, len(arrays["lengths"])
    collate = BertCollate(VOCABULARY, context.device, packed=config.data.bert_pack)
    return [
        collate(taken(arrays, slice(first, first + size)), tuple(range(first, first + size)))
        for first in range(context.data.rank * size, count, context.data.size * size)
    ]


def train(config: Config, arrays, context: ParallelContext, feed=None) -> Record:
    """One step on these samples, in the micro-batches of `feed`, by default those of `batches`."""
    training_plan = training_plan_of(config, context.data.size)
    engine = verification_engine(config, training_plan, context)
    return record_steps(engine, training_plan, 1, partial(feed or partial(batches, config), arrays, context))


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    engine = verification_engine(config, training_plan_of(config, 1), solo_context())
    whole = {}
    for spec, state in engine.optimizer.full_state():
        weight = spec.unshard(state["weight"], engine.context.groups)
        whole[spec.name] = weight.double().clone().requires_grad_()
    return whole


def expected(layout: Layout, arrays) -> tuple[float | None, float, dict[str, torch.Tensor]]:
    """Both means and the gradients of their sum."""
    config = configure(layout.serial)
    weights = initial_weights(config)
    model = config.model
    formulas = PlainBert(
        model.num_layers,
        model.num_attention_heads,
        model.apply_residual_connection_post_layernorm,
        model.activation == "gelu_exact",
        epsilon=model.norm_epsilon,
    )
    lm, sop = formulas.losses(weights, arrays)
    masked, count = float(arrays["loss_mask"].sum()), len(arrays["lengths"])
    (sop / count + (lm / masked if masked else 0.0)).backward()
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in weights.items()
    }
    return (lm / masked).item() if masked else None, (sop / count).item(), gradients


LAYOUTS = [
    Layout(shape="bert"),
    Layout(shape="bert", micro_batch=2),
    Layout(shape="bert", micro_batch=2, packed=True),
    Layout(shape="bert", dp=2, zero=2),
    Layout(shape="bert", pp=2),
    Layout(shape="bert", pp=2, untied=True, schedule="zb-h1"),
    Layout(shape="bert", tp=2, sequence_parallel=True),
    Layout(shape="bert-original", tp=2, pp=2, sequence_parallel=True),
]


@over_table("masked", [(1, 20), (20, 1), (7, 0), (0, 0)], ids=str)
@over_table("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_uneven_counts_weigh_every_masked_token_the_same(layout, masked):
    """A mean of the micro-batches' means would make one token of the first count as twenty of the second."""
    arrays = samples([9, 30], masked, WIDTH)
    lm, sop, gradients = expected(layout, arrays)
    world, config = ThreadWorld(layout.world_size), configure(layout)
    records = world.run(lambda rank: train(config, arrays, thread_context(world, layout.grid, rank)))
    norm = torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt().item()
    for record in records:
        losses = record.losses[0]
        assert losses["lm loss"] == (None if lm is None else pytest.approx(lm, rel=1e-5))
        assert losses["sop loss"] == pytest.approx(sop, rel=1e-5)
        assert losses["total loss"] == pytest.approx(sop + (lm or 0.0), rel=1e-5)
        # A tied weight counts once, on whichever stages it is.
        assert record.grad_norms[0] == pytest.approx(norm, rel=1e-4)
    found = {name.removeprefix("copy of "): g for r in records for name, g in r.gradients[0].items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=2e-4, atol=2e-6, msg=name)


def test_the_second_loss_is_not_scaled_by_how_much_the_first_one_counts():
    """The same texts with more and more of them to restore: the binary head learns the same each time.

    All rows go through the last layer, as how many products share a kernel's call shows in the last bits.
    """
    config, context = configure(Layout(shape="bert")), solo_context()

    def whole(arrays, context: ParallelContext, step: Step) -> list:
        return [
            replace(batch, targets=replace(batch.targets, wanted=None))
            for batch in batches(config, arrays, context, step)
        ]

    found = [
        train(config, samples([9, 30], masked, WIDTH), context, whole).gradients[0]["binary_head.weight"]
        for masked in ((0, 0), (1, 0), (1, 20), (9, 30))
    ]
    assert found[0].abs().max() > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-9)


def test_a_step_with_nothing_to_learn_from_changes_nothing():
    config = configure(Layout(shape="bert", binary_head=False))
    weights = initial_weights(config)
    record = train(config, samples([9, 30], (0, 0), WIDTH), solo_context())
    assert record.losses[0]["lm loss"] is None
    assert record.grad_norms == [0.0]
    for name, weight in record.weights[0].items():
        assert weight.double().equal(weights[name].detach()), name


@pytest.mark.parametrize("partition", ["parameters", "cost", "measured", "1,2", "type:Transformer"])
def test_layers_may_be_dealt_in_any_way(partition):
    layout = Layout(shape="bert", pp=2, layers=3, micro_batch=2)
    config = layout.config()
    parallel = config.parallel.model_copy(update={"pipeline_partition": partition})
    records = run_in_threads(config.model_copy(update={"parallel": parallel}), layout.grid, steps=1)
    whole = run_in_threads(layout.serial.config(), layout.serial.grid, steps=1)[0]
    assert records[0].losses[0] == pytest.approx(whole.losses[0], rel=1e-5)
    assert records[0].grad_norms == pytest.approx(whole.grad_norms, rel=1e-4)
