"""Law 1 for losses of several terms from several stages, each with masks of its own.

The model is GPT with two more terms: the mean square of the hidden states after one of its layers, over
positions that the batch names, and a number of its first part that is reported alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megazero.config.steps import Progress, Step
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.gpt import GPT
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.engine import Engine
from megazero.verify.compare import compare
from megazero.verify.record import Record, micro_batches, record_steps
from tests.layouts.layout import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Layout

STEPS = 3
COEFFICIENT = 3.0


@dataclass(frozen=True)
class TermBatch(Batch):
    """`weights`: float32 [b, s], which positions count for the second term."""

    weights: Tensor | None = None

    @property
    def counts(self) -> dict[str, float]:
        """Of all three terms."""
        return {**super().counts, "size": float(self.weights.sum()), "tokens": float(self.tokens.numel())}


class ManyTerms:
    """A part of GPT. The term ``size`` is of the hidden states after layer `at`, whichever part has it."""

    terms = (LossTerm("lm"), LossTerm("size", COEFFICIENT), LossTerm("tokens", 0.0))

    def __init__(self, part: GPT, at: int):
        self.part, self.at, self.seen = part, at, []

    def __getattr__(self, name: str):
        return getattr(self.part, name)

    def watch(self) -> None:
        """Once ZeRO has put its hooks to the layer."""
        for layer in self.part.layers:
            if spec_of(next(layer.parameters())).name.startswith(f"layers.{self.at}."):
                layer.register_forward_hook(lambda module, args, output: self.seen.append(output[0]))

    def run(self, batch: TermBatch, hidden=None, *, deferred=None):
        result = self.part.run(batch, hidden, deferred=deferred)
        terms = dict(result.terms)
        if self.seen:
            terms["size"] = self.size(self.seen.pop(), batch.weights.t())
        if self.part.embedding is not None:
            terms["tokens"] = batch.tokens.float().sum()
        return replace(result, terms=terms)

    def size(self, x: Tensor, weights: Tensor) -> Tensor:
        """From [s, b, h], or this rank's rows [s/tp, b, h], and weights [s, b]."""
        tp, rows = self.part.placement.tp, len(x)
        if rows == len(weights):
            return (x.float().square().mean(-1) * weights).sum()
        own = (x.float().square().mean(-1) * weights[tp.rank * rows :][:rows]).sum()
        whole = own.detach().clone()
        tp.all_reduce(whole).wait()
        return own + (whole - own.detach())


def make(config: Config, at: int, context: ParallelContext) -> Engine:
    padded = -(-VOCABULARY // (4 * context.tp.size)) * 4 * context.tp.size
    chunks = build_chunks(config, Vocabulary(VOCABULARY, padded, None, None), context)
    wrapped = {number: ManyTerms(chunk, at) for number, chunk in chunks.items()}
    engine = build_engine(config, training_plan_of(config, context.data.size), wrapped, context)
    for chunk in wrapped.values():
        chunk.watch()
    return engine


def batches(config: Config, context: ParallelContext, step: Step) -> list[TermBatch]:
    """Uneven masks of both terms. In step 1 every other sample has nothing for ``size``, in step 2 all have.

    With two data-parallel ranks and one sample per micro-batch, that is one rank, then both.
    """
    number = step.before.iteration
    rng = np.random.default_rng(number)
    share = 1.0 / (1 + np.arange(GLOBAL_BATCH))[::-1, None]
    weights = (rng.random((GLOBAL_BATCH, SEQUENCE)) < share).astype(np.float32)
    weights[::2] *= number != 1
    weights *= number != 2
    size = config.batch.micro_batch_size
    found = []
    for i, batch in enumerate(micro_batches(config, context, step)):
        first = (i * context.data.size + context.data.rank) * size
        rows = torch.from_numpy(weights[first : first + size])
        found.append(TermBatch(**vars(batch), weights=rows))
    return found


def train(config: Config, at: int, context: ParallelContext) -> Record:
    training_plan = training_plan_of(config, context.data.size)
    return record_steps(make(config, at, context), training_plan, STEPS, partial(batches, config, context))


@cache
def serial(layout: Layout, at: int) -> Record:
    return train(layout.config(), at, solo_context())


def places():
    """Layouts, and the layer that has the second term: on the first stage, a middle one or the last one."""
    yield from ((Layout(zero=zero, micro_batch=m), 0) for zero, m in ((0, 2), (1, 4), (2, 8), (3, 4)))
    yield from ((Layout(dp=2, zero=zero, micro_batch=1 + zero % 2), 1) for zero in range(4))
    yield from ((Layout(tp=2, sequence_parallel=sp), 0) for sp in (False, True))
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        yield from ((Layout(pp=2, schedule=schedule), at) for at in (0, 1))
        yield Layout(pp=4, schedule=schedule, layers=4, micro_batch=2), 1
        yield Layout(pp=2, dp=2, schedule=schedule, zero=2), 0
    for at in (0, 1, 2, 3):
        yield Layout(pp=2, schedule="interleaved", virtual=2, layers=4), at
        yield Layout(pp=2, schedule="zb-v", layers=4, zero=at), at
    yield Layout(pp=2, dp=2, schedule="zb-v", layers=4, zero=3), 1
    yield Layout(pp=2, dp=2, schedule="interleaved", virtual=2, layers=4, zero=3), 2
    yield Layout(tp=2, dp=2, zero=3, sequence_parallel=True), 1
    yield Layout(tp=2, pp=2, dp=2, zero=3, schedule="zb-h1"), 0
    yield Layout(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True), 0


@pytest.mark.parametrize(("layout", "at"), list(places()), ids=lambda x: getattr(x, "name", f"layer{x}"))
def test_terms_of_any_stage_train_as_in_one_process(layout, at):
    world, config = ThreadWorld(layout.world_size), layout.config()
    records = world.run(lambda rank: train(config, at, thread_context(world, layout.grid, rank)))
    bad = [str(d) for d in compare(records, serial(layout.serial, at)) if d.share > 1]
    assert not bad, "\n".join(bad)


def test_one_process_minimizes_the_weighted_sum_of_the_means():
    layout, context = Layout(), solo_context()
    config = layout.config()
    training_plan = training_plan_of(config, 1)
    engine = make(config, 0, context)
    model, mine = engine.executor.chunks[0], batches(config, context, training_plan.at(Progress()))
    sums = [model.run(batch).terms for batch in mine]
    counts = [batch.counts for batch in mine]
    lm, size = (sum(s[name] for s in sums) / sum(c[name] for c in counts) for name in ("lm", "size"))
    total = lm + COEFFICIENT * size
    names = [spec_of(p).name for p in model.part.parameters()]
    gradients = torch.autograd.grad(total, list(model.part.parameters()))
    alone = torch.autograd.grad(
        lm.detach() + COEFFICIENT * model.run(mine[0]).terms["size"], model.part.layers[0].parameters()
    )
    assert all(gradient.any() for gradient in alone), "the second term says nothing"

    record = record_steps(engine, training_plan, 1, lambda step: mine)
    tokens = sum(int(batch.tokens.sum()) for batch in mine) / (GLOBAL_BATCH * SEQUENCE)
    assert record.losses[0] == pytest.approx(
        {"lm loss": lm.item(), "size loss": size.item(), "tokens": tokens, "total loss": total.item()},
        rel=1e-6,
    )
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
    assert record.grad_norms[0] == pytest.approx(norm, rel=1e-5)
    clip = config.optimizer.clip_grad / norm
    for name, gradient in zip(names, gradients, strict=True):
        found = record.gradients[0][name]  # without the vocabulary's padding
        torch.testing.assert_close(found, gradient[: len(found)] * clip, rtol=1e-4, atol=1e-7)


def test_a_term_that_nothing_counts_for_adds_nothing():
    # Step 2 has nothing for `size`: no NaN from 0 / 0, and the loss is that of the other term.
    losses = serial(Layout(), 0).losses
    assert [x["size loss"] is None for x in losses] == [False, False, True]
    assert losses[2]["total loss"] == losses[2]["lm loss"]
    assert losses[1]["total loss"] > losses[1]["lm loss"]
