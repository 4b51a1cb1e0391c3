"""A student beside its teacher, against torch's own KL divergence; what travels between their chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megazero.layers.initialize import initialize
from megazero.models.batch import TextCollate, random_text
from megazero.models.chunk import EMBEDDING, HEAD, Part, Slice
from megazero.models.distilled import DistilledChunk
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from megazero.train.parts.chunks import placement_of
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

WIDE = {"hidden_size": 48, "ffn_hidden_size": 64, "hidden_dropout": 0.5}


def build(layout: Layout, seed: int, parts: tuple[Part, ...] | None = None, **shape) -> GPT:
    config, context = layout.config(), solo_context()
    model = config.model.model_copy(update=shape)
    placement = placement_of(config.parallel, config.precision.dtype, context, torch.device("cpu"))
    gpt = GPT(Slice(model_spec(model), (VOCABULARY, 64), placement, config.recompute, parts))
    initialize(gpt, seed, context.place)
    return gpt


def batch(seed: int | None = 3, *, masked: bool = True):
    arrays = random_text(np.random.default_rng(1), 2, SEQUENCE, VOCABULARY)
    if not masked:
        del arrays["loss_mask"]
    return TextCollate(VOCABULARY, torch.device("cpu"), seed=seed)(arrays, (0, 1))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("masked", [True, False])
def test_the_divergence_and_its_gradient_are_torch_s(temperature, masked):
    student, teacher = build(Layout(), 1), build(Layout(), 2, **WIDE)
    given = batch(masked=masked)
    sums = DistilledChunk(student, teacher, 0.5, temperature).run(given).terms

    logits = student(given)[..., :VOCABULARY]
    with torch.no_grad():
        wanted = teacher(replace(given, places=replace(given.places, sample_keys=None)))[..., :VOCABULARY]
    rows = [F.log_softmax(x / temperature, -1) for x in (logits, wanted)]
    each = F.kl_div(*rows, reduction="none", log_target=True).sum(-1)
    mask = 1.0 if given.learnt.weights is None else given.learnt.weights.t()
    true = (each * mask).sum()
    assert sums["kd"].item() == pytest.approx(true.item(), rel=1e-5)
    weights = [p for p in student.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(x, weights, retain_graph=True) for x in (sums["kd"], true))
    largest = max(g.abs().max() for g in theirs)
    assert all((a - b).abs().max() <= 1e-5 * largest for a, b in zip(ours, theirs, strict=True))
    assert all(p.grad is None for p in teacher.parameters())


def test_its_weight_is_beta_times_the_temperature_squared():
    term = DistilledChunk(build(Layout(), 1), build(Layout(), 2), 0.5, 3.0).terms[-1]
    assert (term.name, term.coefficient, term.over, term.evaluated) == ("kd", 4.5, "lm", False)


def test_chunks_pass_both_on_and_evaluations_the_student_alone():
    first, last = (EMBEDDING, 0), (1, HEAD)
    parts = [
        DistilledChunk(
            build(Layout(untied=True), 1, span), build(Layout(untied=True), 2, span, **WIDE), 1.0, 1.0
        )
        for span in (first, last)
    ]
    given = batch()
    assert parts[0].output_boundary(given).shape == (SEQUENCE, 2, 32 + 48)
    hidden = parts[0].run(given).hidden
    assert hidden.shape == (SEQUENCE, 2, 80)
    sums = parts[1].run(given, hidden).terms
    whole = DistilledChunk(build(Layout(untied=True), 1), build(Layout(untied=True), 2, **WIDE), 1.0, 1.0)
    expected = whole.run(given).terms
    assert sums["kd"].item() == pytest.approx(expected["kd"].item(), rel=1e-6)
    assert sums["lm"].item() == pytest.approx(expected["lm"].item(), rel=1e-6)
    with torch.no_grad():
        assert parts[0].output_boundary(given).shape == (SEQUENCE, 2, 32)
        alone = parts[0].run(given).hidden
        assert alone.shape == (SEQUENCE, 2, 32)
        assert set(parts[1].run(given, alone).terms) == {"lm"}


def test_without_its_teacher_it_is_the_student():
    chunk = DistilledChunk(build(Layout(), 1), build(Layout(), 2), 1.0, 1.0)
    chunk.teacher = None
    assert chunk.terms == chunk.student.terms
    assert set(chunk.run(batch()).terms) == {"lm"}
