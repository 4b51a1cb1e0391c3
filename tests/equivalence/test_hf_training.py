"""Ten steps from a Hugging Face folder are those of transformers and torch's AdamW, on any layout."""

from __future__ import annotations

import pytest
import torch

from megazero.checkpoint.part import WEIGHT
from megazero.config.steps import Step
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.formats.hf.reader import HFReader
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.step.state import TrainState
from megazero.verify.record import Record, micro_batches, record_steps, verification_engine
from tests.formats.hf.descendants import SAMPLES
from tests.formats.hf.samples import VOCAB
from tests.layouts.layout import Layout

pytest.importorskip("transformers")

STEPS = 10
ONE, TWO_SLICES, TWO_STAGES = Layout(), Layout(tp=2), Layout(pp=2)
LAYOUTS = (ONE, TWO_SLICES, TWO_STAGES)
# Of three layers two stages would have unequal numbers.
THREE_LAYERS = ("qwen3-moe", "deepseek-v3", "deepseek-v2", "deepseek-v2-lite")
FAST = {
    **{"qwen3": TWO_STAGES, "olmo2": TWO_SLICES, "gemma3": TWO_STAGES, "gpt-oss": TWO_SLICES},
    **{"deepseek-v3": TWO_SLICES, "falcon": TWO_STAGES, "opt": TWO_STAGES, "mamba2": TWO_SLICES},
    **{"nemotron-h": TWO_STAGES, "bamba": TWO_SLICES, "cohere2": TWO_SLICES},
}
CASES = [
    *((name, layout) for name, layout in FAST.items()),
    *(
        pytest.param(name, layout, marks=pytest.mark.slow)
        for name in SAMPLES
        for layout in LAYOUTS
        if FAST.get(name) != layout and (layout != TWO_STAGES or name not in THREE_LAYERS)
    ),
]


def config_of(name: str, layout: Layout, folder: str) -> Config:
    """The layout's configuration for a sample, without dropout and with a constant learning rate."""
    config = layout.config(STEPS)
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_router_bias_update_rate": 0.0}
    shape = {"vocab_size": VOCAB, "make_vocab_size_divisible_by": 1, "seq_length": 16}
    positions = {"max_position_embeddings": 31}
    model = SAMPLES[name].ours.model_copy(update={**still, **shape, **positions})
    optimizer = OptimizerConfig(
        lr=1e-3, lr_decay_style="constant", clip_grad=0.5, weight_decay=0.1, adam_eps=1e-4
    )
    sections = {"model": model, "optimizer": optimizer, "checkpoint": CheckpointConfig(load_hf=folder)}
    return config.model_copy(update=sections)


def run_ours(config: Config, context: ParallelContext) -> Record:
    plan = training_plan_of(config, context.data.size)
    engine = verification_engine(config, plan, context)
    take_foreign_weights(config, context, VOCAB, engine)
    return record_steps(engine, plan, STEPS, lambda step: micro_batches(config, context, step))


def run_theirs(model: torch.nn.Module, config: Config) -> list[float]:
    """Losses of the same steps; the model, which drops nothing in evaluation, is trained in place."""
    section = config.optimizer
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and "bias" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "bias" in name]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        groups, section.lr, (section.adam_beta1, section.adam_beta2), section.adam_eps, section.weight_decay
    )
    losses, state, plan = [], TrainState(), training_plan_of(config, 1)
    for _ in range(STEPS):
        step: Step = plan.at(state.progress)
        batches = micro_batches(config, solo_context(), step)
        masks = [
            torch.ones(batch.tokens.shape) if batch.learnt.weights is None else batch.learnt.weights
            for batch in batches
        ]
        count = sum(mask.sum() for mask in masks)
        total = 0.0
        for batch, mask in zip(batches, masks, strict=True):
            logits = model(batch.tokens).logits.flatten(0, 1)
            each = torch.nn.functional.cross_entropy(logits, batch.learnt.labels.flatten(), reduction="none")
            loss = (each * mask.flatten()).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_grad)
        adam.step()
        adam.zero_grad()
        losses.append(total)
        state = state.after(step, skipped=False)
    return losses


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: getattr(value, "name", value))
def test_ten_steps_are_those_of_transformers(name, layout, tmp_path):
    theirs = SAMPLES[name].build()
    theirs.save_pretrained(tmp_path / "begin")
    folder = str(tmp_path / "begin")
    expected = run_theirs(theirs, config_of(name, ONE, folder))
    theirs.save_pretrained(tmp_path / "end")
    config, world = config_of(name, layout, folder), ThreadWorld(layout.world_size)
    records = world.run(lambda rank: run_ours(config, thread_context(world, layout.grid, rank)))
    losses = [next(iter(loss.values())) for loss in records[0].losses]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    weights = {name: w for record in records for name, w in record.weights[-1].items()}
    with HFReader(tmp_path / "end") as reader, HFReader(tmp_path / "begin") as begin:
        keys = [key for key in reader.shapes if key.kind == WEIGHT]
        assert {key.name for key in keys} == {name for name in weights if not name.startswith("copy of")}
        for key in keys:
            torch.testing.assert_close(weights[key.name], reader.tensor(key), rtol=0, atol=1e-6)
            assert (reader.tensor(key) - begin.tensor(key)).abs().max() > 1e-3  # ten steps of 1e-3
