"""Activation checkpointing (DeepSpeed's page on it). `configure` belongs to the process: the order counts."""

from __future__ import annotations

import torch

from tests.deepspeed.checks import check, outcome


def block():
    """A layer with dropout."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.Tanh())


def gradients(call, x):
    """The output and gradients of a block that `call` runs."""
    module = block()
    out = call(module, x)
    out = out[0] if isinstance(out, (tuple, list)) else out
    torch.rand(2)
    out.square().sum().backward()
    return [float(out.sum()), float(module[0].weight.grad.sum()), None if x.grad is None else x.grad.tolist()]


def plain_and_recomputed(call):
    """Whether a block gives the same with and without recompute, and what it gives."""
    x = torch.ones(2, 4, requires_grad=True)
    plain = gradients(lambda module, x: module(x), x)
    x = torch.ones(2, 4, requires_grad=True)
    return [gradients(call, x) == plain, plain]


@check()
def nothing_is_configured_at_first(deepspeed, scratch):
    deepspeed.init_distributed("gloo")
    return deepspeed.checkpointing.is_configured()


@check()
def a_function_can_be_recomputed_without_configure(deepspeed, scratch):
    return plain_and_recomputed(deepspeed.checkpointing.checkpoint)


@check()
def configure_says_so(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    return deepspeed.checkpointing.is_configured()


@check()
def recompute_repeats_dropout(deepspeed, scratch):
    deepspeed.checkpointing.configure(None, partition_activations=False)
    return plain_and_recomputed(deepspeed.checkpointing.checkpoint)


@check(
    here=True,
    why="DeepSpeed loses the inputs where they are in host memory without being partitioned",
)
def inputs_in_host_memory(deepspeed, scratch):
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    found = plain_and_recomputed(deepspeed.checkpointing.checkpoint)
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=False)
    return found[0]


@check()
def without_reentry(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    return plain_and_recomputed(deepspeed.checkpointing.non_reentrant_checkpoint)


@check()
def without_reentry_no_input_needs_gradients(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    return gradients(deepspeed.checkpointing.non_reentrant_checkpoint, torch.ones(2, 4))


@check(here="accepted", why="recompute is not reentrant, so parameters alone may require gradients")
def no_input_needs_gradients(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    return outcome(lambda: gradients(deepspeed.checkpointing.checkpoint, torch.ones(2, 4)))


@check()
def several_outputs(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    x = torch.ones(3, requires_grad=True)
    one, two = deepspeed.checkpointing.checkpoint(lambda x: (x * 2, x * 3), x)
    (one + two).sum().backward()
    return [one.tolist(), two.tolist(), x.grad.tolist()]


@check()
def several_inputs_of_any_kind(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    x = torch.ones(3, requires_grad=True)
    mask = torch.tensor([True, False, True])
    out = deepspeed.checkpointing.checkpoint(
        lambda x, mask, factor, note: x * mask * factor, x, mask, 4, None
    )
    out.sum().backward()
    return [out.tolist(), x.grad.tolist()]


@check()
def inputs_by_keyword(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    x = torch.ones(3, requires_grad=True)
    out = deepspeed.checkpointing.checkpoint(lambda x, factor: x * factor, x, factor=torch.full((3,), 5.0))
    out.sum().backward()
    return x.grad.tolist()


@check()
def functions_within_functions(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    call = deepspeed.checkpointing.checkpoint
    x = torch.full((2,), 0.5, requires_grad=True)
    y = call(torch.sin, call(torch.exp, x))
    y.sum().backward()
    return [y.tolist(), x.grad.tolist()]


@check()
def one_function_twice(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    module, x = block().eval(), torch.ones(2, 4, requires_grad=True)
    call = deepspeed.checkpointing.checkpoint
    (call(module, x) + call(module, x * 2)).sum().backward()
    return module[0].weight.grad.tolist()


@check()
def without_gradients_it_is_a_call(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    with torch.no_grad():
        out = deepspeed.checkpointing.checkpoint(torch.exp, torch.zeros(2))
    return [out.tolist(), out.requires_grad]


@check()
def contiguous_memory_needs_partitioning(deepspeed, scratch):
    return outcome(
        lambda: deepspeed.checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    )


@check()
def contiguous_memory_with_what_it_needs(deepspeed, scratch):
    found = outcome(
        lambda: deepspeed.checkpointing.configure(
            None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2
        )
    )
    deepspeed.checkpointing.configure(None, partition_activations=False, contiguous_checkpointing=False)
    return found


@check()
def a_section_of_the_json_counts(deepspeed, scratch):
    section = {"cpu_checkpointing": False, "number_checkpoints": 4}
    path = scratch / "config.json"
    path.write_text('{"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": false}}')
    call = deepspeed.checkpointing.configure
    return [
        outcome(lambda: call(None, {"train_batch_size": 1, "activation_checkpointing": section})),
        outcome(lambda: call(None, str(path))),
    ]


@check()
def steps_may_be_reset(deepspeed, scratch):
    deepspeed.checkpointing.configure(None)
    deepspeed.checkpointing.set_num_layers(3)
    deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    return deepspeed.checkpointing.reset()


@check()
def a_stream_has_one_name_and_one_seed(deepspeed, scratch):
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 1)
    found = [
        outcome(lambda: tracker.add("a", 2)),
        outcome(lambda: tracker.add("b", 1)),
        sorted(tracker.get_states()),
    ]
    tracker.reset()
    return [*found, sorted(tracker.get_states())]


@check()
def a_stream_must_have_begun(deepspeed, scratch):
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()

    def fork():
        with tracker.fork("none"):
            pass

    return outcome(fork)


@check()
def the_tracker_is_one(deepspeed, scratch):
    call = deepspeed.checkpointing.get_cuda_rng_tracker
    return call() is call()
