"""`init_inference`: slices a model, converts it and wraps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.legacy.inference.checkpoint import checkpoint_files, give_memory, load_weights
from megazero.deepspeed.legacy.inference.config import DeepSpeedInferenceConfig, read_config
from megazero.deepspeed.legacy.inference.engine import InferenceEngine
from megazero.deepspeed.legacy.inference.fused import inject
from megazero.deepspeed.legacy.inference.own import own_model
from megazero.deepspeed.tensor_parallel.cutter import Cutter, synchronise
from megazero.deepspeed.tensor_parallel.layers import SlicedLinear, is_linear
from megazero.deepspeed.tensor_parallel.policy import SlicingPolicy, slice_model
from megazero.deepspeed.tensor_parallel.training import TensorParallelRequest
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext, solo_context
from megazero.mpu.launch import Launch, choose_device


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Make a model ready for inference: sliced over ranks, on its device and in its type.

    The ranks that hold one copy of the model are adjacent; a world of more ranks holds several copies.

    Args:
        model: a Hugging Face model, one of megazero's, or any module.
        config: the configuration, or the path of a JSON; see `DeepSpeedInferenceConfig`.
        kwargs: keys of the configuration.

    Raises:
        ConfigError: names what is wrong with the configuration, or the model cannot be sliced so.
        CheckpointError: `checkpoint` does not hold the model's weights.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__}")
    read = read_config(config, kwargs)
    own = own_model(model)
    context = _context(read)
    if own is None:
        slice_model(Cutter(model, context.tp, trained=False), _policy(read))
    elif context.tp.size > 1:
        raise ConfigError(
            "`tensor_parallel.tp_size` must be 1 for a model of megazero's, which is sliced when it is "
            "built, but "
            f"is {context.tp.size}; leave it out"
        )
    device = torch.device("cpu") if read.keep_module_on_host else context.device
    _fill(model, read, context, device)
    dtype = _convert(model, read) if own is None else own.check(read)
    injected = inject(model) if read.replace_with_kernel_inject and own is None else {}
    if own is None and read.dtype == torch.int8 and read.quant.enabled and read.quant.weight.enabled:
        quantize(model, dtype, read.quant.weight.q_groups)
    model.to(device).eval()
    synchronise(context.tp, context.device)
    generate: Callable[..., Any] | None = own.generate if own else getattr(model, "generate", None)
    sliced = context if context.tp.size > 1 else None
    return InferenceEngine(model, read, sliced, dict(injected), generate)


def _context(config: DeepSpeedInferenceConfig) -> ParallelContext:
    """The ranks that the model is sliced over; with one, the world is not joined."""
    section = config.tensor_parallel
    size = section.tp_size if section.enabled else 1
    if section.tp_group is not None:
        size = section.tp_group.size()
    request = TensorParallelRequest(size, group=section.tp_group)
    if section.mpu is not None:
        return find_context(section.mpu)
    if size == 1:
        return solo_context(choose_device("auto", Launch.from_environment().local_rank))
    context = find_context(request.layout(None))
    request.check_group(context)
    return context


def _policy(config: DeepSpeedInferenceConfig) -> SlicingPolicy:
    injection = config.injection_policy
    if config.injection_policy_tuple is not None:
        raise ConfigError(
            "`injection_policy_tuple` must be left out here; give `injection_policy` with the class of the "
            "layers"
        )
    return SlicingPolicy(injection=injection)


def _fill(
    model: nn.Module, config: DeepSpeedInferenceConfig, context: ParallelContext, device: torch.device
) -> None:
    """Load the checkpoint, if there is one."""
    checkpoint = config.checkpoint or config.checkpoint_config.checkpoint_dir
    if checkpoint is None:
        if any(param.is_meta for param in model.parameters()):
            raise ConfigError(
                "`checkpoint` must be given for a model on the meta device, but is not; give the folder of "
                "its "
                "weights"
            )
        return
    base_dir = config.base_dir or config.checkpoint_config.base_dir or ""
    files = checkpoint_files(checkpoint, base_dir)
    give_memory(model, device)
    load_weights(model, files, context.tp)


def _convert(model: nn.Module, config: DeepSpeedInferenceConfig) -> torch.dtype:
    """Convert weights, and buffers that a checkpoint holds; others (rotary tables) keep their type."""
    dtype: torch.dtype = config.dtype
    if dtype == torch.int8:  # products need a floating type: the model's own if it is half
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        dtype = own
    kept = model.state_dict().keys()
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name in kept:
            buffer.data = buffer.data.to(dtype)
    return dtype


class LayerPolicy:
    """A policy of DeepSpeed's for a family; here the family's row of the table decides instead."""


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: `initialize` slices for training and `init_inference` for inference, without being told."""


class Int8Rows(nn.Module):
    """A weight [n, m] as int8 with a scale for each of `groups` parts of each row: the part's largest / 127.

    It halves the memory of fp16 weights, and costs one pass over them in each product.

    Args:
        dtype: the type of products.
        groups: parts of a row; rows that do not divide by it have one.
    """

    def __init__(self, dtype: torch.dtype, groups: int):
        super().__init__()
        self.dtype, self.groups = dtype, groups

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Round a weight."""
        parts = weight.float().view(weight.shape[0], self._parts(weight.shape[1]), -1)
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return (parts / scale).round().to(torch.int8).view_as(weight), scale

    def forward(self, rounded: Tensor, scale: Tensor) -> Tensor:
        """The weight again."""
        parts = rounded.view(*scale.shape[:2], -1).to(scale.dtype)
        return (parts * scale).view_as(rounded).to(self.dtype)

    def _parts(self, width: int) -> int:
        return self.groups if width % self.groups == 0 else 1


def quantize(model: nn.Module, dtype: torch.dtype, groups: int) -> int:
    """Round the weights of all linear layers but the output layer, and return how many layers that are."""
    model.requires_grad_(False)
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    layers = [
        module
        for module in model.modules()
        if (is_linear(module) or isinstance(module, SlicedLinear)) and module is not head
    ]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Int8Rows(dtype, groups), unsafe=True)
    return len(layers)
