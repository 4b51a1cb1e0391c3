"""`init_compression` before training, `redundancy_clean` after it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megazero.deepspeed.legacy.compression.helper import copy_layers
from megazero.deepspeed.legacy.compression.layers import (
    CompressedLayer,
    can_compress,
    can_shrink,
    compress_layer,
    is_norm,
    release_layer,
    shrink,
)
from megazero.deepspeed.legacy.compression.prune import Pruning, PruningKind
from megazero.deepspeed.legacy.compression.quantize import ActivationQuantizer, WeightQuantizer
from megazero.deepspeed.legacy.compression.settings import LayerGroup, Technique, read_compression
from megazero.errors import ConfigError


class CompressionScheduler:
    """Counts the optimizer steps for compressed layers; an engine calls `step` after each of its steps.

    Args:
        model: a model that `init_compression` returned.
        config: has no effect.
    """

    def __init__(self, model: nn.Module, config: object = None):
        self.model = model
        self.training_steps = 0

    def step(self, step: int | None = None) -> None:
        """Advance by one step, or to the given step."""
        self.training_steps = self.training_steps + 1 if step is None else step
        for layer in compressed_layers(self.model):
            layer.treatment.step = self.training_steps


def init_compression(
    model: nn.Module,
    deepspeed_config: object,
    teacher_model: nn.Module | None = None,
    mpu: object = None,
) -> nn.Module:
    """Make the layers of a model train with compressed weights, in place; call it before `initialize`.

    Layers keep their identity and their parameters; pruning with learned masks adds scores as parameters. The
    engine counts the steps by ``model.compression_scheduler``.

    Args:
        model: has linear layers, convolutions or embeddings of torch's.
        deepspeed_config: a DeepSpeed JSON with a section `compression_training`: its path, its content, or a
            `DeepSpeedConfig`.
        teacher_model: the model to copy layers from, for `layer_reduction`.
        mpu: must be None or have one tensor-parallel rank, because layers are torch's and whole on each rank.

    Returns:
        The model.

    Raises:
        ConfigError: the section is wrong, a group matches no layers, or a layer is in two groups.
    """
    settings = read_compression(deepspeed_config)
    sliced = getattr(mpu, "get_tensor_model_parallel_world_size", lambda: 1)()
    if sliced != 1:
        raise ConfigError(f"`mpu` must have one tensor-parallel rank for compression, but has {sliced}")
    if settings.reduction is not None:
        if teacher_model is None:
            raise ConfigError("`teacher_model` must be given with `layer_reduction`, but is not")
        copy_layers(model, teacher_model, settings.reduction)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for technique in settings.techniques:
        group_of: dict[str, str] = {}
        for group in technique.groups:
            for name, module in _layers_of(model, technique, group):
                if name in group_of:
                    raise ConfigError(
                        f"`{technique.name}` must have each layer in one group, but `{name}` is in "
                        f"{group_of[name]} and {group.name}"
                    )
                group_of[name] = group.name
                rows = any(module.weight is table for table in tables)
                _configure(compress_layer(module), technique, group, by_row=rows)
            for module, related in _related_layers(model, technique, group):
                for norm in filter(is_norm, related):
                    _share_mask(compress_layer(norm), module, technique)
    scheduler = CompressionScheduler(model)
    scheduler.step(0)
    model.__dict__["compression_scheduler"] = scheduler
    return model


def _layers_of(model: nn.Module, technique: Technique, group: LayerGroup) -> list[tuple[str, nn.Module]]:
    """Return the name and the module of each layer in a group, in the model's order."""
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if can_compress(module) and any(_matches(pattern, name) for pattern in group.modules)
    ]
    if not chosen:
        raise ConfigError(
            f"`{technique.name}.different_groups.{group.name}.modules` must name linear layers, "
            f"convolutions or embeddings, but {', '.join(group.modules)} names none"
        )
    return chosen


def _matches(pattern: str, name: str) -> bool:
    return pattern == "*" or re.search(pattern, name) is not None


def _configure(layer: CompressedLayer, technique: Technique, group: LayerGroup, *, by_row: bool) -> None:
    """Add a technique to a layer's compression.

    by_row: whether each row of the weight is rounded by itself, as an embedding's is, also where a linear
    layer shares its table.
    """
    treatment, shared, params = layer.treatment, technique.shared, group.params
    symmetric = shared.get("quantization_type") == "symmetric"
    treatment.offsets[technique.name] = technique.offset
    if technique.name == "weight_quantization":
        mixed = shared["fp16_mixed_quantize"]
        groups = len(layer.weight) if by_row else shared["quantize_groups"]
        if layer.weight.numel() % groups:
            raise ConfigError(
                f"`quantize_groups` must divide a weight's {layer.weight.numel()} numbers, but is {groups}"
            )
        treatment.weights = WeightQuantizer(
            params["target_bits" if shared["quantize_weight_in_forward"] else "start_bits"],
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
        kind: PruningKind = technique.name  # type: ignore[assignment]  # all others are handled above
        learned, heads = shared["method"] == "topk", shared.get("num_heads", 1)
        ratio = params["dense_ratio"]
        treatment.prunings[kind] = Pruning(kind, layer.weight, ratio, learned=learned, heads=heads)


def _share_mask(norm: CompressedLayer, layer: nn.Module, technique: Technique) -> None:
    """Make a norm zero the channels that are pruned in the layer before it."""
    norm.treatment.offsets[technique.name] = technique.offset
    norm.treatment.prunings[technique.name] = compress_layer(layer).treatment.prunings[technique.name]


def compressed_layers(model: nn.Module) -> Iterator[CompressedLayer]:
    """Yield the compressed layers of a model."""
    for module in model.modules():
        if can_shrink(module) and hasattr(module, "treatment"):
            yield compress_layer(module)


@torch.no_grad()
def redundancy_clean(model: nn.Module, deepspeed_config: object, mpu: object = None) -> nn.Module:
    """Make compression permanent, in place: weights become the quantized and masked ones.

    Pruned rows, heads and channels are removed if `related_modules` names the layers that are connected to
    them. Layers that quantize their inputs continue to do so; all others become torch's classes again.

    Args:
        model: the trained model, whole (at ZeRO stage 3, first load what `save_16bit_model` wrote).
        deepspeed_config: see `init_compression`.
        mpu: has no effect.

    Returns:
        The model.
    """
    settings = read_compression(deepspeed_config)
    for technique in settings.techniques:
        rounded: set[int] = set()  # a table that layers share is rounded once
        for group in technique.groups:
            for layer, related in _related_layers(model, technique, group):
                compressed = compress_layer(layer)
                if technique.name == "weight_quantization" and id(compressed.weight) in rounded:
                    compressed.treatment.weights = None
                rounded.add(id(compressed.weight))
                _make_permanent(model, compressed, technique, related)
    for layer in list(compressed_layers(model)):
        release_layer(layer)
    model.__dict__.pop("compression_scheduler", None)
    return model


def _related_layers(
    model: nn.Module, technique: Technique, group: LayerGroup
) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return each layer of a group, and the connected layers that shrink with it."""
    layers = _layers_of(model, technique, group)
    if not group.related:
        return [(layer, []) for _, layer in layers]
    result = []
    for own, patterns in zip(group.modules, group.related, strict=True):
        pruned = [layer for name, layer in layers if _matches(own, name)]
        columns = []
        for pattern in patterns:
            named = model.named_modules()
            related = [module for name, module in named if can_shrink(module) and _matches(pattern, name)]
            if len(related) != len(pruned):
                raise ConfigError(
                    f"`related_modules` must name one linear layer, convolution or batch norm for each of "
                    f"the {len(pruned)} pruned ones, but `{pattern}` names {len(related)}"
                )
            columns.append(related)
        result += [(layer, [column[number] for column in columns]) for number, layer in enumerate(pruned)]
    return result


def _make_permanent(
    model: nn.Module, layer: CompressedLayer, technique: Technique, related: list[nn.Module]
) -> None:
    """Apply a technique to the weights of a layer, and remove the technique from the layer."""
    treatment = layer.treatment
    if technique.name == "weight_quantization" and treatment.weights is not None:
        end = 2**16 * max(1, treatment.weights.period)  # the period doubles at most 15 times
        layer.weight.copy_(treatment.weights(layer.weight, end))
        treatment.weights = None
    elif technique.name in treatment.prunings:
        pruning = treatment.prunings.pop(technique.name)
        assert isinstance(pruning, Pruning)
        if not related:
            layer.weight.mul_(pruning.mask_for(layer.weight))
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


def _remove_heads(model: nn.Module, layer: CompressedLayer, related: list[nn.Module], kept: Tensor) -> None:
    """Remove heads from an output projection and the projections before it.

    The numbers of heads and features that the attention modules store are updated.
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
