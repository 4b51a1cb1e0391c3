"""How much memory the states of a model take: DeepSpeed's estimators by name, with this library's layout.

Weights are of 2 bytes (bf16 or fp16); masters, both of Adam's moments and gradient sums are of 4 bytes each.
Other needs of a step (activations, gradients on their way, state on its way from a disk) are left out.
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
    """Bytes of the states at ZeRO stage 2.

    Args:
        total_params: parameters of the model.
        num_gpus_per_node: devices, and ranks, of a node.
        num_nodes: number of nodes.
        cpu_offload: whether masters, moments and gradient sums are on the host.
        additional_buffer_factor: a factor of the host's bytes, as a reserve.

    Returns:
        Bytes of a node's host memory, and of a device's memory.
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
    """Bytes of the states at ZeRO stage 3, if one layer at a time is whole.

    Args:
        total_params: parameters of the model.
        largest_layer_params: parameters of its largest module, those of modules inside left out.
        num_gpus_per_node: devices, and ranks, of a node.
        num_nodes: number of nodes.
        cpu_offload: whether masters, moments and gradient sums are on the host.
        cpu_offload_params: whether the slices of the weights are there too.
        zero_init: whether the model is built under `Init`; otherwise each rank begins with all of it in fp32.
        additional_buffer_factor: a factor of the host's bytes, as a reserve.

    Returns:
        Bytes of a node's host memory, of a device's memory, and of the largest layer, which is in the latter.
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
    """Print the estimates of `estimate_zero2_model_states_mem_needs` with and without offload."""
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
    """Print the same for a model."""
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
    """Print the estimates of `estimate_zero3_model_states_mem_needs` for each way to offload and to begin."""
    place = num_gpus_per_node, num_nodes
    rows = {}
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for begins in (True, False):
            options = f"offload_param={_PLACE[params]}, offload_optimizer={_PLACE[optimizer]}"
            rows[f"{options}, zero_init={int(begins)}"] = estimate_zero3_model_states_mem_needs(
                *(total_params, largest_layer_params, *place, optimizer, params, begins),
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
    """Print the same for a model."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *count_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The parameters of a model, each once, and those of its largest module without the modules inside."""
    layers = [sum(map(elements, module.parameters(recurse=False))) for module in model.modules()]
    return sum(map(elements, model.parameters())), max(layers)


def _print_table(model: str, place: tuple[int, int], rows: Mapping[str, Sequence[int]]) -> None:
    """Print bytes of a node's host and of a device, by options; what follows them in a row is left out."""
    devices, nodes = place
    print(f"States of {model}, on {nodes} node(s) of {devices} device(s), weights of {_WEIGHT} bytes:")
    print("  per node's host |  per device | options")
    for options, (host, device, *_) in rows.items():
        print(f"  {host / _GIB:11,.2f} GiB | {device / _GIB:7,.2f} GiB | {options}")
