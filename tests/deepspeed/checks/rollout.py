"""Responses of the model that is trained, and losses on them: `runtime.rollout`."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch

from tests.deepspeed.checks import check, outcome


def names():
    """The module."""
    return importlib.import_module("deepspeed.runtime.rollout")


def engine_of(deepspeed, stage=0):
    """A tiny GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


PROMPTS = torch.tensor([[23, 5, 6], [7, 8, 9]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


def write(deepspeed, end, stage=0, **sampling):
    """A rollout as lists."""
    engine = engine_of(deepspeed, stage)
    tokenizer = SimpleNamespace(pad_token_id=23, eos_token_id=end)
    rollout = names().build_rollout(names().RolloutConfig(), student_engine=engine, tokenizer=tokenizer)
    torch.manual_seed(4)
    options = names().SamplingConfig(max_new_tokens=6, **sampling)
    batch = rollout.generate(names().RolloutRequest(PROMPTS, MASK), options)
    rollout.sync_weights(1)
    rollout.shutdown()
    return [batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.response_start_idx.tolist()]


@check()
def the_most_probable_tokens(deepspeed, scratch):
    whole = write(deepspeed, None, temperature=0.0)
    ends = whole[0][0][5]  # a token that it writes
    return [whole, write(deepspeed, ends, temperature=0.0), write(deepspeed, ends, stage=3, temperature=0.0)]


@check()
def drawn_tokens(deepspeed, scratch):
    return write(deepspeed, 1, temperature=0.8, top_p=0.9, top_k=12, n_samples_per_prompt=2)


@check(tolerance=1e-5)
def losses_on_responses(deepspeed, scratch):
    torch.manual_seed(5)
    student, teacher = torch.randn(2, 4, 7), torch.randn(2, 4, 7)
    mask = torch.tensor([[True, True, False, True], [False, True, False, False]])
    loss, found = names().generalized_jsd_loss, []
    for options in (
        {},
        {"beta": 0.0},
        {"beta": 1.0},
        {"beta": 0.2, "temperature": 2.0},
        {"teacher_top_k": 3},
        {"pointwise_clip": 0.05},
    ):
        out = loss(student, teacher, mask, **options)
        found.append([out.loss.item(), out.loss_sum.item(), out.valid_token_count.item()])
    none = loss(student, teacher, torch.zeros_like(mask))
    return [found, none.loss.item()]


@check()
def targets_of_responses(deepspeed, scratch):
    ids = torch.arange(10).view(2, 5)
    batch = names().RolloutBatch(ids, torch.tensor([[0, 1, 1, 1, 0], [1] * 5]), torch.tensor([2, 3]))
    made = names().ResponseTokenBatch.from_rollout(batch)
    logits = torch.arange(30.0).view(2, 5, 3)
    return [
        made.target_ids.tolist(),
        made.response_mask.tolist(),
        made.select_causal_logits(logits).tolist(),
        [batch.batch_size, batch.seq_len],
    ]


@check()
def what_cannot_be(deepspeed, scratch):
    module, ids = names(), torch.arange(6).view(2, 3)
    logits, mask = torch.zeros(1, 2, 3), torch.ones(1, 2)
    late = lambda: module.RolloutBatch(ids, ids, torch.tensor([0, 1]))  # noqa: E731
    return [
        outcome(lambda: module.RolloutRequest(ids, ids[:1])),
        outcome(lambda: module.RolloutBatch(ids, ids, torch.zeros(3))),
        outcome(lambda: module.ResponseTokenBatch.from_rollout(late())),
        outcome(lambda: module.build_rollout(module.RolloutConfig(engine="vllm"))),
        outcome(lambda: module.build_rollout(module.RolloutConfig())),
        outcome(lambda: module.generalized_jsd_loss(logits, logits, mask, beta=1.5)),
        outcome(lambda: module.generalized_jsd_loss(logits, logits, mask, temperature=0)),
        outcome(lambda: module.generalized_jsd_loss(logits, logits, mask, teacher_top_k=4)),
        outcome(lambda: module.generalized_jsd_loss(logits, logits, mask[:, :1])),
        outcome(lambda: module.generalized_jsd_loss(logits, logits, mask)),
    ]
