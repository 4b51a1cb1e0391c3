"""How much memory the states of a model take: DeepSpeed's estimators by name, with this library's layout.

Weights are of 2 bytes (bf16 or fp16); masters, both of Adam's moments and gradient sums are of 4 bytes each.
Other needs of a step (activations, gradients on their way, state on its way from a disk) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_WEIGHT, _STATE, _GIB = 2, 16, 2**30
_START = 4  # bytes of an fp32 weight before it is sharded


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
    _title(total_params, None, num_gpus_per_node, num_nodes)
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _row(host, device, f"offload_optimizer={'cpu' if offload else 'none'}")


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
    _title(total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            places = [("offload_param", params), ("offload_optimizer", optimizer)]
            options = [f"{name}={'cpu' if on else 'none'}" for name, on in places]
            _row(host, device, ", ".join([*options, f"zero_init={int(zero_init)}"]))


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

    def elements(params: Iterable[nn.Parameter]) -> int:
        return sum(getattr(param, "ds_numel", param.numel()) for param in params)

    layers = [elements(module.parameters(recurse=False)) for module in model.modules()]
    return elements(model.parameters()), max(layers)


def _title(total: int, layer: int | None, devices: int, nodes: int) -> None:
    largest = "" if layer is None else f", {layer / 1e6:,.1f}M of them in the largest layer"
    print(
        f"States of {total / 1e6:,.1f}M parameters{largest}, on {nodes} node(s) of {devices} device(s), "
        f"weights of {_WEIGHT} bytes:"
    )
    print("  per node's host |  per device | options")


def _row(host: int, device: int, options: str) -> None:
    print(f"  {host / _GIB:11,.2f} GiB | {device / _GIB:7,.2f} GiB | {options}")
