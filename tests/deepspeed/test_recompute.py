"""Activation checkpointing by DeepSpeed's names: the same numbers, and only inputs are kept."""

from __future__ import annotations

import contextvars

import pytest
import torch
from torch import nn

from megazero.deepspeed.models import recompute
from megazero.deepspeed.models.random_states import get_cuda_rng_tracker
from megazero.errors import ConfigError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.tables import over_table


@pytest.fixture(autouse=True)
def _own_settings():
    """Restore the settings after each test."""
    settings, tracker = recompute._SETTINGS, get_cuda_rng_tracker()
    before, states = settings.get(), tracker.get_states()
    settings.set(recompute.CheckpointingSettings())
    yield
    settings.set(before)
    tracker.set_states(states)


def block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4), nn.Dropout(0.5))


def gradients(call, x: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(5)
    module.zero_grad()
    x.grad = None
    out = call(module, x)
    torch.rand(3)  # what follows forward must not change what backward repeats
    out.square().sum().backward()
    return [out.detach(), x.grad.clone(), *(param.grad.clone() for param in module.parameters())]


@over_table("more", [{}, {"checkpoint_in_cpu": True}, {"profile": True, "synchronize": True}])
@over_table("call", [recompute.checkpoint, recompute.non_reentrant_checkpoint])
def test_gradients_and_random_numbers_are_those_without_it(call, more, capsys):
    recompute.configure(None, **more)
    module, x = block(), torch.randn(3, 4, requires_grad=True)
    plain = gradients(lambda module, x: module(x), x, module)
    again = gradients(call, x, module)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    printed = capsys.readouterr().out
    assert ("checkpointed forward" in printed and "checkpointed backward" in printed) == ("profile" in more)


def test_inputs_alone_are_kept():
    module, x = block(), torch.randn(3, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        recompute.checkpoint(module, x)
    assert set(kept) <= {x.shape, torch.Size([0])}


def test_no_input_needs_gradients_and_keywords_have_them():
    module, x = block(), torch.randn(3, 4)
    recompute.checkpoint(module, x).sum().backward()
    assert module[0].weight.grad is not None
    scale = torch.tensor(2.0, requires_grad=True)
    out = recompute.checkpoint(lambda x, debug, scale: (x * scale, debug), x, scale=scale, debug="mine")
    out[0].sum().backward()
    assert out[1] == "mine"
    assert scale.grad == pytest.approx(float(x.sum()))


@pytest.mark.parametrize("in_cpu", [False, True])
def test_tensor_parallel_ranks_keep_a_part_each(in_cpu):
    grid, world = ProcessGrid(tp=2), ThreadWorld(2, timeout=30.0)
    value = torch.randn(3, 4)
    odd = torch.randn(3, 1)

    def work(rank: int):
        recompute.configure(thread_context(world, grid, rank), None, True, checkpoint_in_cpu=in_cpu)
        assert recompute.is_configured()
        x, y = value.clone().requires_grad_(), odd.clone().requires_grad_()
        mask = torch.ones(3, 4, dtype=torch.bool)
        (recompute.checkpoint(lambda x, y, mask: (x.sin() * y * mask).cos(), x, y, mask)).sum().backward()
        recompute.partition_activations_in_checkpoint(False)
        keeping = recompute._CheckpointInputs(thread_context(world, grid, rank).tp)
        _, (kept, *_) = keeping._pack(torch.ones(4, 4))
        return x.grad, y.grad, kept.numel()

    plain_x, plain_y = value.clone().requires_grad_(), odd.clone().requires_grad_()
    (plain_x.sin() * plain_y).cos().sum().backward()
    for x, y, size in world.run(work):
        torch.testing.assert_close(x, plain_x.grad, rtol=0, atol=0)
        torch.testing.assert_close(y, plain_y.grad, rtol=0, atol=0)
        assert size == 8
    assert not recompute.is_configured()  # the ranks' settings are theirs


def test_named_streams_go_on_are_repeated_and_differ_between_ranks():
    recompute.model_parallel_cuda_manual_seed(10)
    tracker = get_cuda_rng_tracker()
    torch.manual_seed(10 + 2718)
    expected = torch.rand(4)
    torch.manual_seed(10)
    alone = torch.rand(2)
    torch.manual_seed(10)
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), alone)
    with tracker.fork():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), expected)

    drawn = []

    def noisy(x):
        with tracker.fork():
            drawn.append(torch.rand(3))
        return x * drawn[-1]

    x = torch.ones(3, requires_grad=True)
    out = recompute.checkpoint(noisy, x)
    with tracker.fork():
        after = torch.rand(1)
    out.sum().backward()
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(x.grad, drawn[0])
    with tracker.fork():
        assert not torch.equal(torch.rand(1), after)  # the stream went on, not back
    with pytest.raises(ConfigError, match="must be a new stream with a seed of its own"):
        tracker.add("other", 10 + 2718)
    with pytest.raises(ConfigError, match="`none` must be a stream that `add` began"), tracker.fork("none"):
        pass
    recompute.model_parallel_reconfigure_tp_seed(11)
    torch.manual_seed(11 + 2718)
    expected = torch.rand(2)
    with tracker.fork():
        assert torch.equal(torch.rand(2), expected)


def test_the_json_is_the_default_and_arguments_win(tmp_path):
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    content = {"train_batch_size": 1, "activation_checkpointing": section}
    recompute.configure(None, content)
    settings = recompute.current_settings()
    assert (settings.partition, settings.in_cpu, settings.num_layers) == (True, True, 4)
    recompute.configure(None, content, partition_activations=False, contiguous_checkpointing=False)
    assert recompute.current_settings().partition is False
    with pytest.raises(ConfigError, match="`partition_activations` must be given for `contiguous_check"):
        recompute.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    with pytest.raises(ConfigError, match="`num_checkpoints` must be given"):
        contextvars.copy_context().run(
            lambda: (
                recompute._SETTINGS.set(recompute.CheckpointingSettings()),
                recompute.configure(None, partition_activations=True, contiguous_checkpointing=True),
            )
        )
    recompute.set_num_layers(2)
    recompute.configure(None, partition_activations=True, contiguous_checkpointing=True)
    recompute.reset()
