"""A training on conversations has the losses of transformers with the same labels, on any layout."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.data_tools.conversations import main
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.build import build_model
from megazero.train.folders import read_folder
from megazero.train.parts.feeds import build_feeds
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.resume.weights import take_foreign_weights
from megazero.verify.record import record_steps
from tests.data.conversations.templates import CHATML
from tests.data.conversations.tokenizer import byte_level, write_folder
from tests.layouts.layout import Layout

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

STEPS, LENGTH, SAMPLES = 3, 96, 4
WORDS = ["What", "is", "the", "capital", "of", "France", "?", "Paris", "Rome", "Italy", "thank", "you"]
# Words of each turn.
ROWS = [[3, 5], [2, 9, 4, 1], [8, 2], [1, 1], [6, 12], [4, 3, 2, 7], [9, 9], [5, 1], [2, 2, 2, 2], [7, 6]]
LAYOUTS = {
    "one": (Layout(), ()),
    "T2": (Layout(tp=2), ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "P2": (Layout(pp=2), ("--pipeline-model-parallel-size", "2")),
    "cp2": (Layout(cp=2), ("--context-parallel-size", "2")),
    "D2": (Layout(dp=2), ()),
}


def conversation(lengths: list[int]) -> list[dict[str, str]]:
    text = cycle(WORDS)
    roles = cycle(("user", "assistant"))
    return [{"role": next(roles), "content": " ".join(islice(text, length))} for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small Llama with a tokenizer and a chat template, and a dataset `chats` made of ROWS."""
    place = tmp_path_factory.mktemp("llama")
    write_folder(place, byte_level(), CHATML, eos="<|im_end|>")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=360,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        eos_token_id=3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    lines = [json.dumps({"messages": conversation(lengths)}) for lengths in ROWS]
    (place / "chats.jsonl").write_text("\n".join(lines))
    where = ["--input", f"{place}/chats.jsonl", "--output-prefix", f"{place}/chats"]
    assert main([*where, "--tokenizer-model", str(place)]) == 0
    return place


def config_of(folder: Path, flags: tuple[str, ...], ranks: int) -> Config:
    """All samples in each step, so that their order does not matter."""
    line = (
        f"--load-hf {folder} --data-path {folder}/chats --split 1,0,0 --pack best-fit --reset-attention-mask "
        f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {SAMPLES} --train-iters {STEPS} "
        "--lr 1e-3 --lr-decay-style constant --clip-grad 0.5 --adam-eps 1e-4 --weight-decay 0.1 "
        "--num-workers 0 --make-vocab-size-divisible-by 1 --eval-iters 0"
    )
    return parse_config([*line.split(), *flags], world_size=ranks, reader=read_folder).config


def losses_of(config: Config, context: ParallelContext) -> list[float | None]:
    plan, vocabulary = training_plan_of(config, context.data.size), build_vocabulary(config)
    engine = build_model(vocabulary, context, config, plan)
    take_foreign_weights(config, context, vocabulary.size, engine)
    train = build_feeds(config, plan, vocabulary, context, 0).train
    assert train is not None
    assert len(train.dataset) == STEPS * SAMPLES
    record = record_steps(engine, plan, STEPS, train.of_step)
    return [loss["lm loss"] for loss in record.losses]


def their_losses(folder: Path) -> list[float]:
    """Each conversation by itself, with transformers' own mask; the mean is over all counted tokens."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, 1e-3, (0.9, 0.999), 1e-4, 0.1)
    encoded = [
        tokenizer.apply_chat_template(
            conversation(lengths), return_dict=True, return_assistant_tokens_mask=True
        )
        for lengths in ROWS
    ]
    count, losses = sum(sum(row["assistant_masks"]) for row in encoded), []
    for _ in range(STEPS):
        total = 0.0
        for row in encoded:
            ids, mask = torch.tensor([row["input_ids"]]), torch.tensor([row["assistant_masks"]])
            loss = model(ids, labels=ids.where(mask == 1, -100), num_items_in_batch=count).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_transformers(folder, name):
    layout, flags = LAYOUTS[name]
    config, world = config_of(folder, flags, layout.world_size), ThreadWorld(layout.world_size)
    losses = world.run(lambda rank: losses_of(config, thread_context(world, layout.grid, rank)))[0]
    expected = their_losses(folder)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert expected[0] - expected[-1] > 1e-3
