"""Families are values: what the trainer knows of a kind of model is one row."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import get_args

from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architectures import ARCHITECTURES, SCORERS
from megazero.models.chunk import Block
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.train.parts import chunks
from megazero.train.parts.chunks import (
    assign_parts,
    build_chunks,
    estimated_costs,
    measured_costs,
    parameter_counts,
)
from megazero.train.parts.families import FAMILIES, family_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import ENCODERS, SHAPES, VOCABULARY, Layout
from tests.tables import over_table

VOCAB = Vocabulary(VOCABULARY, 64, None, None)


def test_the_table_and_the_setting_name_the_same_families():
    assert set(get_args(ModelConfig.model_fields["family"].annotation)) == set(FAMILIES)
    assert all(FAMILIES[name].name == name for name in FAMILIES)


def test_each_architecture_of_transformers_is_of_one_family():
    owners = Counter(each.name for family in FAMILIES.values() for each in family.architectures)
    assert owners == Counter(each.name for each in ARCHITECTURES)
    for family in FAMILIES.values():
        assert all(dict(each.ours_fixed)["family"] == family.name for each in family.architectures)


def test_classifiers_have_the_architectures_that_classify():
    def names(family: str, classes: int | None) -> set[str]:
        model = Layout().config().model.model_copy(update={"family": family, "num_classes": classes})
        return {each.name for each in family_of(model).architectures}

    kinds = ("SequenceClassification", "MultipleChoice")
    expected = {f"{prefix}For{kind}" for prefix in ("Bert", "MegatronBert") for kind in kinds}
    assert names("bert", 3) == names("bert", 1) == expected < names("bert", None)
    assert names("gpt", 3) == {each.name for each in SCORERS}


def test_measured_losses_of_an_encoder_are_of_the_share_that_is_masked():
    config = Layout().config()
    masked = config.model_copy(update={"data": config.data.model_copy(update={"mask_prob": 0.4})})
    assert FAMILIES["bert"].samples.objective(masked) == {"mask_prob": 0.4}
    assert FAMILIES["gpt"].samples.objective(masked) == {}


@over_table("shape", SHAPES)
def test_what_a_row_says_is_what_it_builds(shape):
    config = Layout(layers=3, shape=shape).config()
    family = family_of(config.model)
    (chunk,) = build_chunks(config, VOCAB, solo_context()).values()
    blocks = family.models.blocks(config, VOCAB.padded)
    *others, head = range(len(blocks))
    parts = [chunk.blocks()[n : n + 1] for n in others] + [
        chunk.blocks()[head:]
    ]  # further tokens are the head's
    assert [type(part[0]).__name__ for part in parts] == [block.kind for block in blocks]
    counts = parameter_counts(config, VOCAB, solo_context())
    built = [sum(p.numel() for p in {p for block in part for p in block.parameters()}) for part in parts]
    assert counts == built  # the tied head's weight is counted with both, as its stage would hold a copy
    assert chunk.head.weight is chunk.weight("embedding.word.weight") is chunk.embedding.word


@over_table("untied", [False, True])
@over_table("schedule", ["1f1b", "zb-v"])
def test_a_tied_weight_is_shared_on_a_stage_and_copied_to_another(schedule, untied):
    """The first of two stages is built. In a V it has the head too; in a line the other one has it."""
    layout = Layout(pp=2, layers=4, schedule=schedule, untied=untied)
    chunks = build_chunks(layout.config(), VOCAB, solo_context())
    word = chunks[0].weight("embedding.word.weight")
    assert spec_of(word).shared == (schedule == "1f1b" and not untied)
    assert list(chunks) == ([0] if schedule == "1f1b" else [0, 3])
    if schedule == "zb-v":
        assert (chunks[3].head.weight is word) == (not untied)


def uneven(family):
    """The family, as if its third layer took as much as seven others."""

    def blocks(config, padded_vocab):
        first, *layers, last = family.models.blocks(config, padded_vocab)
        return (
            first,
            *(Block(i, f"{each.kind}{i}", 7.0 if i == 2 else 1.0) for i, each in enumerate(layers)),
            last,
        )

    return dataclasses.replace(family, models=dataclasses.replace(family.models, blocks=blocks))


@over_table(
    ("method", "expected"), [("cost", [2, 1, 3]), ("type:Layer[34]", [4, 1, 1]), ("uniform", [2, 2, 2])]
)
@over_table("shape", ["gpt2", "bert"])
def test_layers_may_differ_where_they_are_dealt(method, expected, shape, monkeypatch):
    config = Layout(pp=3, layers=6, shape=shape).config()
    parallel = config.parallel.model_copy(update={"pipeline_partition": method})
    config = config.model_copy(update={"parallel": parallel})
    # The head of a model this small would outweigh its layers.
    family = uneven(family_of(config.model))
    monkeypatch.setattr(chunks, "family_of", lambda model: _without_head(family))
    assigned = assign_parts(config, VOCAB, solo_context())
    assert [sum(isinstance(part, int) for part in parts) for parts in assigned] == expected


def _without_head(family):
    def blocks(config, padded_vocab):
        *others, last = family.models.blocks(config, padded_vocab)
        return (*others, Block(last.part, last.kind, 0.0))

    return dataclasses.replace(family, models=dataclasses.replace(family.models, blocks=blocks))


@over_table("shape", ["gpt2", *ENCODERS])
def test_alike_blocks_are_measured_once_and_cost_the_same(shape):
    config = Layout(layers=4, shape=shape).config()
    seconds = measured_costs(config, VOCAB, solo_context())
    layers = list(zip(seconds, estimated_costs(config, VOCAB, solo_context()), strict=True))[1:-1]
    assert len(layers) == 4
    assert len(set(layers)) == len({flops for _, flops in layers}) <= 2  # an encoder's last layer is narrowed
    assert min(seconds) > 0


def test_random_arrays_become_a_batch_that_knows_its_counts():
    import numpy as np

    config = Layout().config()
    family = family_of(config.model)
    arrays = family.samples.random_arrays(np.random.default_rng(3), 4, 16, VOCABULARY)
    batch = family.samples.collate(config, VOCABULARY, solo_context(), None)(arrays, (0, 1, 2, 3))
    assert batch.counts["lm"] == float(arrays["loss_mask"].sum())
    assert arrays["loss_mask"].mean(axis=1)[0] == 1.0 > arrays["loss_mask"].mean(axis=1)[3]
    assert (arrays["tokens"][:, 1:] == arrays["labels"][:, :-1]).all()


def test_random_samples_become_a_batch_that_knows_its_counts():
    import numpy as np

    config = Layout(shape="bert").config()
    family = family_of(config.model)
    arrays = family.samples.random_arrays(np.random.default_rng(3), 4, 16, VOCABULARY)
    batch = family.samples.collate(config, VOCABULARY, solo_context(), None)(arrays, (0, 1, 2, 3))
    assert batch.counts["lm"] == batch.counts["lm_accuracy"] == arrays["loss_mask"].sum() > 0
    assert (batch.counts["sop"], batch.counts["padding"]) == (4.0, 64.0)
    assert batch.padding == 64 - arrays["lengths"].sum()
