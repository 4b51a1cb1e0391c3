"""Estimates of the memory of model states: DeepSpeed's names, megazero's layout.

Weights take 2 bytes (bf16 or fp16); masters, each of Adam's two moments, and gradient sums take 4 bytes each.
Activations and buffers for gradients and offloaded states are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from megazero.account.profilers.flops.counter import elements

_WEIGHT, _STATE, _GIB = 2, 16, 2**30
_START = 4  # bytes of an fp32 weight before it is sharded
_PLACE = ("none", "cpu")


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Estimate the memory of model states at ZeRO stage 2.

    Args:
        total_params: the number of parameters in the model.
        num_gpus_per_node: the number of devices, and ranks, of a node.
        num_nodes: the number of nodes.
        cpu_offload: whether masters, moments and gradient sums are on the host.
        additional_buffer_factor: multiplies the host's bytes, as a reserve.

    Returns:
        The bytes of host memory per node, and of device memory per rank.
    """
    shard = -(-total_params // (num_gpus_per_node * num_nodes))
    whole, state = _WEIGHT * total_params, _STATE * shard
    if not cpu_offload:
        return 0, whole + state
    return int(state * num_gpus_per_node * additional_buffer_factor), whole


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Estimate the memory of model states at ZeRO stage 3, if one layer at a time is gathered.

    Args:
        total_params, num_gpus_per_node, num_nodes: see `estimate_zero2_model_states_mem_needs`.
        largest_layer_params: the number of parameters of the largest module, without those of its submodules.
        cpu_offload, additional_buffer_factor: see there.
        cpu_offload_params: whether the shards of the weights are on the host too.
        zero_init: whether the model is built under `Init`; otherwise each rank starts with all of it in fp32.

    Returns:
        The bytes of host memory per node, of device memory per rank, and of the largest layer, which the
        device memory includes.
    """
    shard, layer = -(-total_params // (num_gpus_per_node * num_nodes)), _WEIGHT * largest_layer_params
    slices, state = _WEIGHT * shard, _STATE * shard
    host = (state if cpu_offload else 0) + (slices if cpu_offload_params else 0)
    device = slices + state - host + layer
    host = int(host * num_gpus_per_node * additional_buffer_factor)
    if not zero_init:
        host = max(host, _START * total_params * num_gpus_per_node)
    return host, device, layer


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the estimates of stage 2 with and without offload."""
    place = num_gpus_per_node, num_nodes
    rows = {
        f"offload_optimizer={_PLACE[offload]}": estimate_zero2_model_states_mem_needs(
            total_params, *place, offload, additional_buffer_factor
        )
        for offload in (True, False)
    }
    _print_table(f"{total_params / 1e6:,.1f}M parameters", place, rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the estimates of stage 2 for a model, with and without offload."""
    total, _ = count_parameters(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the estimates of stage 3 for all offloads, with and without `Init`."""
    place = num_gpus_per_node, num_nodes
    rows = {}
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            options = f"offload_param={_PLACE[params]}, offload_optimizer={_PLACE[optimizer]}"
            rows[f"{options}, zero_init={int(init)}"] = estimate_zero3_model_states_mem_needs(
                *(total_params, largest_layer_params, *place, optimizer, params, init),
                additional_buffer_factor,
            )
    largest = f"{largest_layer_params / 1e6:,.1f}M of them in the largest layer"
    _print_table(f"{total_params / 1e6:,.1f}M parameters, {largest}", place, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the estimates of stage 3 for a model, for all offloads, with and without `Init`."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *count_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters in a model, and of its largest module without those of submodules."""
    layers = [sum(map(elements, module.parameters(recurse=False))) for module in model.modules()]
    return sum(map(elements, model.parameters())), max(layers)


def _print_table(model: str, place: tuple[int, int], rows: Mapping[str, Sequence[int]]) -> None:
    """Print the host's and the device's bytes, the first two of each row."""
    devices, nodes = place
    print(f"States of {model}, on {nodes} node(s) of {devices} device(s), weights of {_WEIGHT} bytes:")
    print("  per node's host |  per device | options")
    for options, (host, device, *_) in rows.items():
        print(f"  {host / _GIB:11,.2f} GiB | {device / _GIB:7,.2f} GiB | {options}")
