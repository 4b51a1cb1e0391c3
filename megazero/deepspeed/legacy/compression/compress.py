"""`init_compression` before training, `redundancy_clean` after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.compression.helper import copy_layers
from megazero.deepspeed.legacy.compression.layers import (
    Compressed,
    CompressedEmbedding,
    can_compress,
    can_shrink,
    compress_layer,
    is_norm,
    release_layer,
    shrink,
)
from megazero.deepspeed.legacy.compression.prune import Pruning, What
from megazero.deepspeed.legacy.compression.quantize import ActivationQuantizer, WeightQuantizer
from megazero.deepspeed.legacy.compression.settings import LayerGroup, Technique, read_compression
from megazero.errors import ConfigError


class CompressionScheduler:
    """Counts optimizer steps for the layers of a model; an engine calls `step` after each of its own.

    Args:
        model: a model that `init_compression` has returned.
        config: not read; DeepSpeed's has it.
    """

    def __init__(self, model: nn.Module, config: Any = None):
        self.model = model
        self.training_steps = 0

    def step(self, step: int | None = None) -> None:
        """Count one more step, or go to the given one."""
        self.training_steps = self.training_steps + 1 if step is None else step
        for layer in compressed_layers(self.model):
            layer.treatment.step = self.training_steps


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Make the layers of a model compress themselves while they are trained; call it before `initialize`.

    Layers stay the same objects with the same parameters; what learns a mask gets scores as parameters. The
    engine counts the steps (`model.compression_scheduler`).

    Args:
        model: has linear layers, convolutions or embeddings of torch's.
        deepspeed_config: a DeepSpeed JSON with a section `compression_training`: path, content, or
            `DeepSpeedConfig`.
        teacher_model: needed for `layer_reduction`.
        mpu: must be None or have no tensor parallelism: layers are torch's, whole on each rank.

    Returns:
        The model.

    Raises:
        ConfigError: the section is refused, a group has no layers, or a layer is in two groups.
    """
    settings = read_compression(deepspeed_config)
    sliced = getattr(mpu, "get_tensor_model_parallel_world_size", lambda: 1)()
    if sliced != 1:
        raise ConfigError(f"`mpu` must have one tensor-parallel rank for compression, but has {sliced}")
    if settings.reduction is not None:
        if teacher_model is None:
            raise ConfigError("`teacher_model` must be given with `layer_reduction`, but is not")
        copy_layers(model, teacher_model, settings.reduction)
    for technique in settings.techniques:
        taken: dict[str, str] = {}
        for group in technique.groups:
            for name, module in _layers_of(model, technique, group):
                if name in taken:
                    raise ConfigError(
                        f"`{technique.name}` must have each layer in one group, but `{name}` is in "
                        f"{taken[name]} and {group.name}"
                    )
                taken[name] = group.name
                _treat(compress_layer(module), technique, group)
            for module, related in _pairs(model, technique, group):
                for norm in filter(is_norm, related):
                    _follow(compress_layer(norm), module, technique)
    scheduler = CompressionScheduler(model)
    scheduler.step(0)
    model.__dict__["compression_scheduler"] = scheduler
    return model


def _layers_of(model: nn.Module, technique: Technique, group: LayerGroup) -> list[tuple[str, nn.Module]]:
    """The layers of a group by name, in the model's order."""
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if can_compress(module) and any(_names(part, name) for part in group.modules)
    ]
    if not chosen:
        raise ConfigError(
            f"`{technique.name}.different_groups.{group.name}.modules` must name linear layers, "
            f"convolutions or embeddings, but {', '.join(group.modules)} names none"
        )
    return chosen


def _names(part: str, name: str) -> bool:
    return part == "*" or re.search(part, name) is not None


def _treat(layer: Compressed, technique: Technique, group: LayerGroup) -> None:
    """Give a layer what a technique does to it."""
    treatment, shared, params = layer.treatment, technique.shared, group.params
    symmetric = shared.get("quantization_type") == "symmetric"
    treatment.offsets[technique.name] = technique.offset
    if technique.name == "weight_quantization":
        mixed = shared["fp16_mixed_quantize"]
        groups = len(layer.weight) if isinstance(layer, CompressedEmbedding) else shared["quantize_groups"]
        if layer.weight.numel() % groups:
            raise ConfigError(
                f"`quantize_groups` must divide a weight's {layer.weight.numel()} numbers, but is {groups}"
            )
        treatment.weights = WeightQuantizer(
            params["start_bits"],
            params["target_bits"],
            params["quantization_period"],
            groups,
            symmetric,
            shared["rounding"] == "stochastic",
            mixed.get("quantize_change_ratio", 0.001) if mixed.get("enabled") else None,
        )
    elif technique.name == "activation_quantization":
        static = shared["range_calibration"] == "static"
        quantizer = ActivationQuantizer(params["bits"], symmetric=symmetric, static=static)
        treatment.inputs = quantizer.to(layer.weight.device).train(layer.training)
    else:
        what: What = technique.name  # type: ignore[assignment]
        learned, heads = shared["method"] == "topk", shared.get("num_heads", 1)
        ratio = params["dense_ratio"]
        treatment.prunings[what] = Pruning(what, layer.weight, ratio, learned=learned, heads=heads)


def _follow(norm: Compressed, layer: nn.Module, technique: Technique) -> None:
    """Let a norm after a layer have zeros where the layer's outputs are pruned."""
    pruning = compress_layer(layer).treatment.prunings[technique.name]
    norm.treatment.offsets[technique.name] = technique.offset
    norm.treatment.prunings[technique.name] = pruning


def compressed_layers(model: nn.Module) -> Iterator[Compressed]:
    """The layers of a model that have a treatment."""
    for module in model.modules():
        if can_shrink(module) and hasattr(module, "treatment"):
            yield compress_layer(module)


@torch.no_grad()
def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make compression permanent: weights are rounded and masked for good.

    What is pruned is removed where `related_modules` names the layers on its other side.

    Layers that round their inputs go on doing so; all others are torch's own again.

    Args:
        model: the trained model, whole (at ZeRO stage 3, load what `save_16bit_model` wrote first).
        deepspeed_config: as for `init_compression`.
        mpu: not read.

    Returns:
        The model.
    """
    settings = read_compression(deepspeed_config)
    for technique in settings.techniques:
        for group in technique.groups:
            for layer, related in _pairs(model, technique, group):
                _make_permanent(model, compress_layer(layer), technique, related)
    for layer in list(compressed_layers(model)):
        release_layer(layer)
    model.__dict__.pop("compression_scheduler", None)
    return model


def _pairs(
    model: nn.Module, technique: Technique, group: LayerGroup
) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Each layer of a group, and those whose other side loses what it loses."""
    layers = _layers_of(model, technique, group)
    if not group.related:
        return [(layer, []) for _, layer in layers]
    pairs = []
    for own, parts in zip(group.modules, group.related, strict=True):
        pruned = [layer for name, layer in layers if _names(own, name)]
        named = [[m for name, m in model.named_modules() if can_shrink(m) and _names(p, name)] for p in parts]
        for part, related in zip(parts, named, strict=True):
            if len(related) != len(pruned):
                raise ConfigError(
                    f"`related_modules` must name one linear layer, convolution or batch norm for each of "
                    f"the {len(pruned)} pruned ones, but `{part}` names {len(related)}"
                )
        pairs += [(layer, [related[number] for related in named]) for number, layer in enumerate(pruned)]
    return pairs


def _make_permanent(
    model: nn.Module, layer: Compressed, technique: Technique, related: list[nn.Module]
) -> None:
    treatment = layer.treatment
    if technique.name == "weight_quantization" and treatment.weights is not None:
        end = 2**16 * max(1, treatment.weights.period)
        layer.weight.copy_(treatment.weights(layer.weight, end))
        treatment.weights = None
    elif technique.name in treatment.prunings:
        pruning = treatment.prunings.pop(technique.name)
        assert isinstance(pruning, Pruning)
        if not related:
            layer.weight.mul_(pruning.over(layer.weight))
            bias = layer._parameters.get("bias")
            if pruning.drops_outputs and bias is not None:
                bias.mul_(pruning.kept())
            return
        kept = pruning.kept().bool()
        for norm in filter(is_norm, related):
            compress_layer(norm).treatment.prunings.pop(technique.name)
        if pruning.drops_outputs:
            shrink(layer, 0, kept)
            for other in related:
                shrink(other, 1, kept)
        else:
            _remove_heads(model, layer, related, kept)


def _remove_heads(model: nn.Module, layer: Compressed, related: list[nn.Module], kept: Tensor) -> None:
    """Remove heads from an output projection and the projections before it.

    The counts that their attention modules keep follow.
    """
    features = kept.repeat_interleave(layer.weight.shape[1] // len(kept))
    shrink(layer, 1, features)
    for other in related:
        shrink(other, 0, features)
    counts = {
        **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), (len(kept), int(kept.sum()))),
        "all_head_size": (len(features), int(features.sum())),
    }
    for parent in model.modules():
        if any(child in related for child in parent.children()):
            for name, (before, after) in counts.items():
                if parent.__dict__.get(name) == before:
                    setattr(parent, name, after)
