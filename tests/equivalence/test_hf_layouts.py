"""Hugging Face both ways, from and to any layout: the same model, bit for bit, and transformers' logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.config.steps import Progress
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.formats.hf.convert import convert_to_hf
from megazero.models.batch import Batch
from megazero.models.chunk import ModelChunk
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from tests.formats.hf.encoder_samples import batch_of
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

PLACES = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, zero=1),
    Layout(dp=3, zero=3),
    Layout(pp=2, dp=2, zero=2),
    Layout(pp=4, schedule="gpipe", layers=4),
    Layout(pp=2, schedule="zb-v", layers=4),
    Layout(tp=2, pp=2, schedule="1f1b"),
    Layout(tp=2, dp=2, zero=3),
)


# transformers has one GELU for MLPs and head.
BERTS = {
    "megatron": {"family": "bert"},
    "original": {"family": "bert", "apply_residual_connection_post_layernorm": True},
}


def config_of(layout: Layout, family: str, untied: bool, **checkpoint) -> Config:
    """The layout's configuration for a model of four layers, whatever it has itself."""
    config = layout.config()
    shape = Layout(shape="gpt2" if family in BERTS else family, untied=untied, layers=4).config().model
    # Without padding on one tensor-parallel rank, with it on several.
    update = {"make_vocab_size_divisible_by": 1, "bert_head_activation": "gelu", **BERTS.get(family, {})}
    model = shape.model_copy(update=update)
    return config.model_copy(update={"model": model, "checkpoint": CheckpointConfig(**checkpoint)})


def on_ranks(layout: Layout, work) -> list:
    world = ThreadWorld(layout.world_size)
    return world.run(lambda rank: work(thread_context(world, layout.grid, rank)))


def export(layout: Layout, config: Config, out: Path) -> dict[str, torch.Tensor]:
    """The state of all ranks of a layout, saved, converted, and opened with the safetensors library."""

    def save(context):
        engine_of = partial(verification_engine, context=context)
        resumed = resume(
            config,
            context,
            VOCABULARY,
            engine_of,
            partial(take_foreign_weights, config, context, VOCABULARY),
        )
        snapshots = Snapshots(
            config, resumed.training_plan, resumed.engine, context, VOCABULARY, config.training.seed
        )
        snapshots.save(TrainState(Progress(1, 8, 8 * SEQUENCE)))
        snapshots.saver.close()

    on_ranks(layout, save)
    convert_to_hf(config.checkpoint.save, out)
    return load_file(out / "model.safetensors")


def save_serial(tmp_path: Path, family: str, untied: bool) -> tuple[dict[str, torch.Tensor], ModelChunk]:
    """What one process exports to ``out0``, and the model that it has."""
    config = config_of(PLACES[0], family, untied, save=str(tmp_path / "run0"))
    first = export(PLACES[0], config, tmp_path / "out0")
    vocabulary = Vocabulary(VOCABULARY, VOCABULARY, None, None)
    serial = config_of(PLACES[0], family, untied)
    return first, build_chunks(serial, vocabulary, solo_context(), torch.device("cpu"))[0]


SOME_PLACES = pytest.mark.parametrize(
    "places",
    [PLACES[1::3], pytest.param(PLACES[1:], marks=pytest.mark.slow)],
    ids=["some", "all"],
)


@SOME_PLACES
@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_layout_is_one_model_there_and_back(tmp_path, family, untied, places):
    transformers = pytest.importorskip("transformers")
    first, ours = save_serial(tmp_path, family, untied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out0").eval()
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % VOCABULARY
    with torch.no_grad():
        logits = ours(Batch(tokens)).transpose(0, 1)[..., :VOCABULARY]
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=1e-5)
        assert logits.std() > 0.1
    there_and_back(tmp_path, first, family, untied, places)


@SOME_PLACES
@pytest.mark.parametrize(
    ("family", "untied"), [("megatron", False), ("original", True)], ids=["megatron-tied", "original-untied"]
)
def test_every_layout_is_one_bert_there_and_back(tmp_path, family, untied, places):
    """Both heads, at the real positions of a padded batch."""
    transformers = pytest.importorskip("transformers")
    first, ours = save_serial(tmp_path, family, untied)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "out0").eval()
    tokens = torch.arange(3 * SEQUENCE).view(3, SEQUENCE) % VOCABULARY
    lengths = (SEQUENCE, 5, 11)
    real = torch.arange(SEQUENCE) < torch.tensor(lengths)[:, None]
    types = ((torch.arange(SEQUENCE) > 3) & real).long()
    with torch.no_grad():
        logits, order = ours(batch_of(tokens, types, lengths))
        found = theirs(tokens, attention_mask=real.long(), token_type_ids=types)
    logits = logits[:, 0, :VOCABULARY]
    torch.testing.assert_close(found.prediction_logits[real], logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.seq_relationship_logits, order, rtol=0, atol=1e-5)
    assert logits.std() > 0.1
    there_and_back(tmp_path, first, family, untied, places)


def there_and_back(
    tmp_path: Path, first: dict[str, torch.Tensor], family: str, untied: bool, places: Sequence[Layout]
) -> None:
    """Every layout exports the same bits as one process, and again after it has read what one exported."""
    for number, layout in enumerate(places, 1):
        # From this layout: its own weights, which are those of the seed on every layout.
        config = config_of(layout, family, untied, save=str(tmp_path / f"run{number}"))
        found = export(layout, config, tmp_path / f"out{number}")
        assert found.keys() == first.keys()
        assert all(torch.equal(found[name], first[name]) for name in first), layout.name
        # To it and back: with another seed, so that all must have been loaded.
        checkpoint = {"save": str(tmp_path / f"back{number}"), "load_hf": str(tmp_path / "out0")}
        config = config_of(layout, family, untied, **checkpoint)
        config = config.model_copy(update={"training": config.training.model_copy(update={"seed": 4321})})
        back = export(layout, config, tmp_path / f"again{number}")
        assert all(torch.equal(back[name], first[name]) for name in first), layout.name
