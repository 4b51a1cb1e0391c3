"""Random-LTD around layers of a script's own, through `data_efficiency.data_routing`."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from tests.deepspeed.checks import check, outcome


class PlainOps:
    """What DeepSpeed compiles for CUDA: sorting, gathering and scattering tokens."""

    def token_sort_(self, indices, length):
        return indices.sort(-1).values

    def _places(self, like, indices, batch_first):
        places = indices.long() if batch_first else indices.long().T
        return places[..., None].expand(-1, -1, like.shape[-1])

    def token_gather(self, tokens, indices, batch_first):
        return tokens.gather(int(batch_first), self._places(tokens, indices, batch_first))

    def token_scatter_(self, tokens, part, indices, batch_first):
        return tokens.scatter_(int(batch_first), self._places(tokens, indices, batch_first), part)


def helper():
    """The module; DeepSpeed gets operators that run on a CPU, and samples by itself."""
    try:
        utils = importlib.import_module("deepspeed.ops.random_ltd.dropping_utils")
    except ImportError:
        pass  # here the operators are torch's
    else:
        utils.random_ltd_module = PlainOps()
    return importlib.import_module("deepspeed.runtime.data_pipeline.data_routing.helper")


class Block(nn.Module):
    """Attention of one head with a residual; `order` says which axis is the sequence."""

    def __init__(self, seq_dim, as_tuple):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.seq_dim, self.as_tuple, self.seen = seq_dim, as_tuple, []

    def forward(self, hidden_states, attention_mask=None):
        self.seen.append(hidden_states.shape[self.seq_dim])
        x = hidden_states if self.seq_dim == 1 else hidden_states.transpose(0, 1)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 6**0.5
        if attention_mask is not None:
            scores = scores + attention_mask[:, 0]
        x = x + self.out(scores.softmax(-1) @ v)
        x = x if self.seq_dim == 1 else x.transpose(0, 1)
        return (x, scores) if self.as_tuple else x


class Stack(nn.Module):
    """Four blocks."""

    def __init__(self, seq_dim, as_tuple):
        super().__init__()
        self.layers = nn.ModuleList(Block(seq_dim, as_tuple) for _ in range(4))

    def forward(self, x, mask):
        keywords = {} if mask is None else {"attention_mask": mask}
        for layer in self.layers:
            x = layer(x, **keywords)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()


def config(kind="encoder", order="batch_seq_dim", mask="attention_mask", layers=(1, 2), stage=0, **more):
    """A JSON: 3 tokens at first, all 9 after six steps."""
    schedule = {
        "min_value": 3,
        "max_value": 9,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 2},
    }
    routing = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": len(layers),
        "random_ltd_layer_id": list(layers),
        "model_mask_name": mask,
        "model_type": kind,
        "hidden_state_order": order,
        "random_ltd_schedule": schedule,
        **more,
    }
    return {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": routing}},
    }


def started(deepspeed, as_tuple=False, folder=None, **keys):
    """An engine whose blocks are converted, from a checkpoint if there is one."""
    torch.manual_seed(11)
    options = config(**keys)
    random_ltd = options["data_efficiency"]["data_routing"]["random_ltd"]
    model = Stack(int(random_ltd["hidden_state_order"] == "batch_seq_dim"), as_tuple)
    more = {"model_parameters": model.parameters()}
    engine, *_ = deepspeed.initialize(model=model, config=options, **more)
    if folder is not None:
        engine.load_checkpoint(str(folder))  # before: afterwards DeepSpeed looks for other names
    return helper().convert_to_random_ltd(engine, Block)


def train(deepspeed, steps=8, **keys):
    """Losses, the tokens that each block saw, and those that were counted."""
    engine = started(deepspeed, **keys)
    order = keys.get("order", "batch_seq_dim")
    blocks = [module for module in engine.module.modules() if type(module).__name__ == "Block"]
    torch.manual_seed(12)
    x, bias = torch.randn(4, 9, 6), torch.randn(4, 1, 9, 9)
    if order == "seq_batch_dim":
        x = x.transpose(0, 1).contiguous()
    mask = bias if keys.get("mask", "attention_mask") else None
    losses = []
    for _ in range(steps):
        loss = engine(x, mask)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(x, mask).item())
    state = engine.random_ltd_scheduler.state_dict()
    names = sorted(helper().save_without_random_ltd(engine))
    return [losses, [block.seen for block in blocks], state, names[:4]]


@check(tolerance=2e-6)
def layers_of_an_encoder(deepspeed, scratch):
    return train(deepspeed)


@check(tolerance=2e-6)
def layers_of_a_decoder_with_tuples(deepspeed, scratch):
    return train(deepspeed, kind="decoder", order="seq_batch_dim", layers=(0, 1, 3), as_tuple=True)


@check(tolerance=2e-6)
def layers_without_a_mask(deepspeed, scratch):
    return train(deepspeed, kind="decoder", mask=None, layers=(2,), stage=1)


@check(ranks=2, tolerance=2e-6)
def layers_at_stage_3_of_two_ranks(deepspeed, scratch):
    return train(deepspeed, stage=3)[1:3]


@check()
def the_schedule_by_itself(deepspeed, scratch):
    make = importlib.import_module(
        "deepspeed.runtime.data_pipeline.data_routing.scheduler"
    ).RandomLTDScheduler
    section = config()["data_efficiency"]["data_routing"]["random_ltd"]
    section.update(global_batch_size=4, layer_token_lr_schedule={"enabled": False})
    scheduler = make(section)
    found = []
    for step in (0, 0, 1, 2, 3, 4, 5, 6, 9):
        scheduler.update_seq(step)
        found.append([scheduler.get_current_seq(), scheduler.get_value(step)])
    scheduler.set_current_seq(5)
    state = scheduler.state_dict()
    scheduler.reset_to_init()
    again = make(section)
    again.load_state_dict(state)
    return [found, state, again.get_current_seq(), scheduler.get_total_layer_tokens(7)]


@check()
def conversions_that_cannot_be(deepspeed, scratch):
    def without():
        model = Stack(1, False)
        engine, *_ = deepspeed.initialize(
            model=model,
            config={"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
            model_parameters=model.parameters(),
        )
        return helper().convert_to_random_ltd(engine, Block)

    return [
        outcome(without),
        outcome(lambda: started(deepspeed, random_ltd_layer_num=3)),
        outcome(lambda: started(deepspeed, layers=(1, 7))),
        outcome(lambda: started(deepspeed, order="dim_seq_batch")),
        outcome(lambda: started(deepspeed, kind="both")),
        outcome(lambda: started(deepspeed)),
    ]


@check()
def names_of_weights(deepspeed, scratch):
    clean = helper().remove_random_ltd_state_dict
    return clean({"layers.1.random_ltd_layer.out.weight": 1, "layers.2.out.weight": 2})


@check(tolerance=2e-6)
def a_training_that_goes_on(deepspeed, scratch):
    first = started(deepspeed, kind="decoder", mask=None)
    torch.manual_seed(12)
    x = torch.randn(4, 9, 6)
    for _ in range(3):
        first.backward(first(x, None))
        first.step()
    first.save_checkpoint(str(scratch))
    again = started(deepspeed, kind="decoder", mask=None, folder=scratch)
    loss = again(x, None)
    again.backward(loss)
    again.step()
    return [again.random_ltd_scheduler.state_dict(), again.global_steps]
