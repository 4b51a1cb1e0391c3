"""Initial weights are a function of (seed, global name) alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.initialize import initialize, initialize_parameters
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec, spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.spec.resolve import model_spec


def small(**changes) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 8, **changes}
    return ModelConfig(**shape)


def test_norms_begin_as_the_identity_and_biases_at_zero():
    model = GPT(Slice(model_spec(small()), (13, 16), Placement.of(solo_context(), torch.float32)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    initialize(model, 3, solo_context().place)
    values = {name: parameter.unique().tolist() for name, parameter in model.named_parameters()}
    constant = {name: each for name, each in values.items() if len(each) == 1}
    assert len(constant) == 2 * 8 + 2  # two norms and four biases of each layer, and the last norm
    assert constant == {name: [1.0 if name.endswith("norm.weight") else 0.0] for name in constant}


def gathered(context, config: ModelConfig, seed: int, padded: int) -> dict[str, str]:
    model = GPT(Slice(model_spec(config), (13, padded), Placement.of(context, torch.float32)))
    initialize(model, seed, context.place)
    whole = {spec_of(p).name: spec_of(p).unshard(p.detach(), context.groups) for p in model.parameters()}
    return {k: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() for k, v in whole.items()}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_gathered_weights_have_one_hash_on_every_layout_and_padding(activation):
    config = small(activation=activation)
    expected = gathered(solo_context(), config, 5, 13)
    assert len(expected) == 2 + 2 * 12 + 2
    for tp, padded in ((2, 14), (4, 32)):
        world = ThreadWorld(tp)
        grid = ProcessGrid(tp=tp)
        runs = world.run(
            lambda r, world=world, grid=grid, padded=padded: gathered(
                thread_context(world, grid, r), config, 5, padded
            )
        )
        assert all(run == expected for run in runs)


def test_seed_and_name_decide():
    a = gathered(solo_context(), small(), 5, 13)
    b = gathered(solo_context(), small(), 6, 13)
    drawn = [name for name in a if a[name] != b[name]]
    assert len(drawn) == 2 + 2 * 4  # embeddings, and four matrices of each layer; the rest are ones and zeros
    assert len({a[name] for name in drawn}) == len(drawn)


def test_weights_are_normal_with_the_wanted_deviation():
    placement = Placement.of(solo_context(), torch.float32)
    holder = torch.nn.Module()
    spec = ParamSpec("w", (400, 500), InitialValues("normal", 0.02))
    holder.w = placement.parameter(spec)
    initialize(holder, 1, placement.place)
    assert abs(holder.w.mean().item()) < 2e-4
    assert abs(holder.w.std().item() - 0.02) < 2e-4
    # Three sigmas hold 99.73% of a normal distribution.
    assert abs((holder.w.abs() < 0.06).float().mean().item() - 0.9973) < 1e-3


def test_padding_rows_are_zero_and_stay_out_of_sight():
    model = GPT(Slice(model_spec(small()), (13, 32), Placement.of(solo_context(), torch.float32)))
    initialize(model, 1, model.placement.place)
    assert torch.equal(model.embedding.word[13:], torch.zeros(19, 16))
    assert model.embedding.word[:13].abs().min() > 0


def test_a_rank_of_a_thousand_constructs_on_meta():
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=128, tp=8), 1023, log)
    config = small(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048)
    model = GPT(
        Slice(
            model_spec(config), (50257, 51200), Placement.of(context, torch.bfloat16, sequence_parallel=True)
        )
    )
    initialize(model, 1, context.place)
    mine = sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())
    # 96 (12 h^2 / 8 + (3 / 8 + 4 / 8 + 6) h) + (51200 / 8 + 2048 + 2) h
    assert mine == 21_855_215_616


def test_a_copy_starts_with_the_values_of_its_original():
    original = ParamSpec("embedding.word.weight", (6, 4), InitialValues("normal", 1.0), shared=True)
    copy = ParamSpec(
        "head.weight", (6, 4), InitialValues("normal", 1.0), tied_with=original.name, shared=True
    )
    other = ParamSpec("head.weight", (6, 4), InitialValues("normal", 1.0))
    placement = Placement.of(solo_context(), torch.float32)
    params = [placement.parameter(spec) for spec in (original, copy, other)]
    initialize_parameters(params, 5, placement.place)
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[0], params[2])


def test_slices_cut_over_two_axes_are_those_of_the_whole():
    """Experts [E, f, h] with E over ep and f over etp, both padded unevenly, and their bias over ep alone."""
    normal, grid = InitialValues("normal", 1.0), ProcessGrid(dp=2, ep=2, tp=2)
    up = ParamSpec(
        "experts.up", (3, 5, 4), normal, (Cut(0, "ep", padded_size=4), Cut(1, "etp", padded_size=6))
    )
    bias = ParamSpec("experts.bias", (4, 5), normal, (Cut(0, "ep"),))

    def initial(context, spec):
        param = Placement.of(context, torch.float32).parameter(spec)
        initialize_parameters([param], 5, context.place)
        return param.detach()

    for spec in (up, bias):
        uncut = initial(solo_context(), replace(spec, cuts=()))
        assert uncut.unique().numel() == uncut.numel(), "no two experts, and no two elements, are equal"
        for rank in range(4):
            context = recording_context(grid, rank, TrafficLog(), "cpu")
            assert torch.equal(initial(context, spec), spec.shard(uncut, context.place))


def test_parameters_may_be_initialized_in_any_parts():
    held = Slice(model_spec(small()), (13, 16), Placement.of(solo_context(), torch.float32))
    whole, parts = GPT(held), GPT(held)
    initialize(whole, 5, whole.placement.place)
    for param in reversed(list(parts.parameters())):
        initialize_parameters([param], 5, parts.placement.place)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)
