"""`get_accelerator()` on the CPU."""

from __future__ import annotations

import os

import torch

from tests.deepspeed.checks import check, outcome


@check()
def one_accelerator(deepspeed, scratch):
    from deepspeed.accelerator import get_accelerator

    found = deepspeed.get_accelerator()
    return [found is get_accelerator(), found is deepspeed.get_accelerator()]


@check()
def names_of_devices(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    return [device.device_name(), device.device_name(0), device.current_device_name(), device._name]


@check(here=[0, "int"], why="DeepSpeed gives LOCAL_RANK as it stands in the environment, a text")
def the_number_of_the_device(deepspeed, scratch):
    number = deepspeed.get_accelerator().current_device()
    return [number, type(number).__name__]


@check()
def counts_of_devices(deepspeed, scratch):
    before = os.environ.get("LOCAL_SIZE")
    os.environ["LOCAL_SIZE"] = "3"
    try:
        return deepspeed.get_accelerator().device_count()
    finally:
        if before is None:
            del os.environ["LOCAL_SIZE"]
        else:
            os.environ["LOCAL_SIZE"] = before


@check()
def it_is_there(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    device.set_device(0)
    device.synchronize()
    device.empty_cache()
    return [device.is_available(), device.communication_backend_name(), device.is_synchronized_device()]


@check()
def tensors_by_type(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    names = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte")
    made = [getattr(device, f"{name}Tensor")([1, 2]) for name in names]
    return [[str(t.dtype), t.device.type, t.tolist()] for t in made]


@check()
def a_tensor_is_on_it(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    return [device.on_accelerator(torch.ones(1)), device.on_accelerator(torch.ones(1, device="meta"))]


@check()
def states_of_the_generator(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    device.manual_seed(5)
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    second = torch.rand(3)
    device.manual_seed_all(5)
    third = torch.rand(3)
    return [torch.equal(first, second), torch.equal(first, third), device.initial_seed()]


@check()
def the_default_generator(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    return [device.default_generator(0) is torch.default_generator, device.random() is torch.random]


@check()
def no_streams_or_events(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    with device.stream(None):
        pass
    return [device.Stream, device.Event, device.current_stream(), device.default_stream()]


@check()
def host_timers(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    names = ("use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")
    return [getattr(device, name)() for name in names]


@check()
def memory_is_that_of_the_process(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    sizes = [getattr(device, name)() for name in (*names, "memory_cached", "max_memory_cached")]
    total, free = device.total_memory(), device.available_memory()
    return [all(1 << 25 < size < total for size in sizes), type(sizes[0]).__name__, 0 < free < total]


@check()
def peaks_of_memory(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    device.reset_peak_memory_stats()
    before = device.max_memory_allocated()
    x = torch.ones(1 << 24)
    during = device.max_memory_allocated()
    del x
    after = device.max_memory_allocated()
    device.reset_max_memory_allocated()
    return [during - before > 1 << 25, after >= during, sorted(device.memory_stats())]


@check(here=["bfloat16", "float16", "float32"], why="torch computes in fp16 on every CPU")
def types_that_it_computes_with(deepspeed, scratch):
    return sorted(str(t).removeprefix("torch.") for t in deepspeed.get_accelerator().supported_dtypes())


@check()
def bf16_is_supported(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    return [device.is_bf16_supported(), device.is_triton_supported()]


@check()
def memory_is_not_pinned(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    x = torch.ones(2)
    return [device.pin_memory(x) is x, x.is_pinned()]


@check()
def ranges_and_lazy_calls(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    device.range_push("here")
    device.range_pop()
    return device.lazy_call(lambda: 7)


@check()
def environments_of_devices(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    environment = {}
    device.set_visible_devices_envs(environment, [1, 3])
    return [environment, device.visible_devices_envs(), device.export_envs()]


@check()
def compilers(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    before = device.get_compile_backend()
    device.set_compile_backend("eager")
    now = device.get_compile_backend()
    device.set_compile_backend(before)
    return [before, now, outcome(lambda: device.set_compile_backend("none-such"))]


@check()
def graphs_are_no_graphs(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    graph = device.create_graph()
    with device.capture_to_graph(graph):
        pass
    device.replay_graph(graph)
    return graph


@check()
def builders_by_name(deepspeed, scratch):
    device = deepspeed.get_accelerator()
    made = device.create_op_builder("CPUAdamBuilder")
    kind = device.get_op_builder("NoSuchBuilder")
    return [type(made).__name__, type(made) is device.get_op_builder("NoSuchBuilder"), kind.__name__]


@check(here=["refused", "accepted"], why="megazero has kernels of its own for some of them")
def operators_of_no_kernel(deepspeed, scratch):
    from deepspeed.ops.op_builder import EvoformerAttnBuilder, RandomLTDBuilder

    return [outcome(lambda kind=kind: kind().load()) for kind in (EvoformerAttnBuilder, RandomLTDBuilder)]


@check()
def another_accelerator(deepspeed, scratch):
    from deepspeed.accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator

    now = get_accelerator()
    set_accelerator(now)
    return [get_accelerator() is now, is_current_accelerator_supported(), outcome(lambda: set_accelerator(3))]


@check()
def it_is_of_a_known_class(deepspeed, scratch):
    from deepspeed.accelerator import DeepSpeedAccelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    found = deepspeed.get_accelerator()
    return [isinstance(found, DeepSpeedAccelerator), isinstance(found, CPU_Accelerator)]
