"""Batches of about as many tokens each: `data_sampling.dynamic_batching`."""

from __future__ import annotations

import importlib

import torch

from tests.deepspeed.checks import check, outcome

LENGTHS = [3, 9, 4, 1, 8, 2, 7, 5, 6, 2, 4, 9, 1, 3, 5, 8, 2, 6, 7, 1, 4, 3]
WHERE = "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr"


def _parts(words):
    """Micro-batches, each with the number of its batch first."""
    return [[*map(int, part.split())] for part in words.split(";")]


PACKED = {
    "as they come": [
        _parts("0 0 1; 1 2 3; 2 4 5; 3 6 7; 4 8 9 10; 5 11 12; 6 13 14; 7 15 16; 8 17; 9 18 19 20; 10 21"),
        [2, 2, 2, 2, 3, 2, 2, 2, 1, 3, 1],
        [9, 4, 8, 7, 6, 9, 5, 8, 6, 7, 3],
    ],
    "short first": [
        _parts("0 3 12 19 5 9 16 0; 1 13 21 2; 2 10 20; 3 7 14; 4 8 17; 5 6; 6 18; 7 4; 8 15; 9 1; 10 11"),
        [7, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1],
        [3, 4, 4, 5, 6, 7, 7, 8, 8, 9, 9],
    ],
    "random": [
        _parts("0 5 17 20; 1 15; 2 7 14; 3 21 19 6; 4 18 13 16; 5 8 0 9; 6 11 3; 7 2; 8 1 12; 9 4 10"),
        [3, 1, 2, 3, 3, 3, 2, 1, 2, 2],
        [6, 8, 5, 7, 7, 6, 9, 4, 9, 8],
    ],
    "few": [
        _parts(
            "0 0 1; 1 2 3; 2 4 5; 3 6 7; 4 8 9; 5 10; 6 11 12; 7 13 14; 8 15 16; 9 17; 10 18 19; 11 20 21"
        ),
        [2, 2, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2],
        [9, 4, 8, 7, 6, 4, 9, 5, 8, 6, 7, 4],
    ],
    "many": [
        _parts("0 3 12 19 5 9 16 0; 1 13 21 2; 2 10 20; 3 7 14; 4 8 17"),
        [7, 3, 2, 2, 2],
        [3, 4, 4, 5, 6],
    ],
    "two at a time": [
        _parts("0 0 1; 0 2 3; 1 4 5; 1 6 7; 2 8 9 10; 2 11 12; 3 13 14; 3 15 16; 4 17; 4 18 19 20"),
        [4, 4, 5, 4, 4],
        [9, 8, 9, 8, 7],
    ],
    "two of one size": [
        _parts(
            "0 0 2; 0 1 3; 1 4; 1 5; 2 6; 2 7; 3 8 10; 3 9 11; 4 12 14; 4 13 15; 5 16 18; 5 17 19; 6 20; 6 21"
        ),
        [4, 2, 2, 4, 4, 4, 2],
        [9, 8, 7, 9, 8, 7, 4],
    ],
    "too long": [
        _parts("0 0 2; 1 3 5; 2 6; 3 7; 4 8; 5 9 10 12; 6 13; 7 14 16; 8 17; 9 18; 10 19 20; 11 21"),
        [2, 2, 1, 1, 1, 3, 1, 2, 1, 1, 2, 1],
        [4, 2, 7, 5, 6, 4, 3, 5, 6, 7, 4, 3],
    ],
    "some": [
        _parts("0 5 3 9; 1 1 0; 2 12 18"),
        [3, 2, 2],
        [2, 9, 7],
    ],
}
"""Each way of packing: the micro-batches, and each batch's samples and greatest length."""


def names():
    """The module."""
    return importlib.import_module(WHERE)


def lengths():
    """Those of a training's samples that are packed: DeepSpeed 0.19.8 leaves out the last one."""
    return LENGTHS[:-1] if names().batch_by_seqlens([1, 1], 2)[1] == [2] else LENGTHS


@check(here=PACKED, why="DeepSpeed 0.19.8 never packs the last sample; later releases do")
def packed_into_micro_batches(deepspeed, scratch):

    def pack(*args, **kwargs):
        micro, sizes, longest = names().batch_by_seqlens(*args, **kwargs)
        return [[[int(number), *map(int, ids)] for number, ids in micro], sizes, list(map(int, longest))]

    return {
        "as they come": pack(LENGTHS, 12),
        "short first": pack(LENGTHS, 12, sequence_picking_order="seqlen"),
        "random": pack(LENGTHS, 12, sequence_picking_order="random", seed=7),
        "few": pack(LENGTHS, 12, max_batch_size=2),
        "many": pack(LENGTHS, 12, min_batch_size=2, sequence_picking_order="seqlen"),
        "two at a time": pack(LENGTHS, 12, effective_batch_size=2),
        "two of one size": pack(LENGTHS, 12, effective_batch_size=2, required_microbatches_of_same_size=True),
        "too long": pack(LENGTHS, 7),
        "some": pack(LENGTHS, 12, sequence_ids_per_mb=[5, 3, 9, 1, 0, 12, 18]),
    }


@check()
def packing_that_cannot_be(deepspeed, scratch):
    pack = names().batch_by_seqlens
    return [
        outcome(lambda: pack(LENGTHS, 12, sequence_picking_order="long")),
        outcome(lambda: pack(LENGTHS[:4], 12, effective_batch_size=4)),
    ]


@check()
def rates_by_size(deepspeed, scratch):
    scale = names().scale_lr
    return [
        scale(8, 2, 0.5, "linear"),
        scale(8, 2, 0.5, "sqrt"),
        scale(8, 2, 0.5, None),
        scale(8, 2, 0.5, "none"),
        outcome(lambda: scale(8, 2, 0.5, "cubic")),
    ]


@check()
def rates_over_a_schedule(deepspeed, scratch):
    found = {}
    for kind in ("constant", "StepLR", "WarmupLR"):
        param = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=0.5)
        base = optimizer
        if kind == "StepLR":
            base = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        elif kind == "WarmupLR":
            make = importlib.import_module("deepspeed.runtime.lr_schedules").WarmupLR
            base = make(optimizer, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
        schedule = names().lr_scheduler_for_variable_batch_size(4, [2, 8, 3], None, base)
        rates = [optimizer.param_groups[0]["lr"]]
        for _ in range(7):
            param.grad = torch.zeros(1)
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        found[kind] = [
            rates,
            schedule.get_lr(),
            schedule.last_epoch,
            schedule.state_dict()["base_batch_size"],
        ]
    return found


class Words(torch.utils.data.Dataset):
    """Sequences of those lengths."""

    def __len__(self):
        return len(lengths())

    def __getitem__(self, number):
        return torch.arange(LENGTHS[number], dtype=torch.float32) / 10


def collate(samples):
    """Padded."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def train(deepspeed, ranks, asks, scheduler=True):
    """Batches' shapes, rates and losses of a training whose batches vary."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    batching = {"enabled": True, "max_tokens": 12, "lr_scaling_method": "linear", "metrics_path": "none"}
    config = {
        "train_batch_size": 2 * ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "dynamic_batching": batching},
        },
    }
    if scheduler:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 3, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    known = {} if asks else {"dataset_seqlens": lengths()}
    loader, schedule, arguments = names().get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        dataset=Words(),
        engine=engine,
        dataloader_collate_fn=collate,
        batch_seqlens_fn=(lambda batch: [(row != 0).sum() + 1 for row in batch]) if asks else None,
        **known,
    )
    engine.lr_scheduler = schedule
    found = []
    for batch in engine.deepspeed_io(**arguments) if asks else loader:
        loss = engine(batch.flatten()[:, None]).square().mean()
        engine.backward(loss)
        rate = engine.get_lr()[0]
        engine.step()
        found.append([list(batch.shape), loss.item(), rate])
    return [found, model.weight.item(), sorted(arguments)]


@check()
def a_training_of_one_rank(deepspeed, scratch):
    return train(deepspeed, 1, asks=False)


@check(ranks=2)
def a_training_of_two_ranks(deepspeed, scratch):
    return train(deepspeed, 2, asks=False)


@check(ranks=2)
def a_training_of_two_ranks_at_constant_rates(deepspeed, scratch):
    return train(deepspeed, 2, asks=False, scheduler=False)


@check()
def a_section_that_is_not_enabled(deepspeed, scratch):
    model = torch.nn.Linear(1, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    ask = names().get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
    return outcome(lambda: ask(Words(), engine, dataset_seqlens=LENGTHS))
