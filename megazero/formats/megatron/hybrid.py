"""Hybrids of Mamba-2 mixers, attention and MLPs: Megatron's names of their tensors, and its arguments.

In a rank's file, the projection's rows are kind after kind: gates (z), inputs (x), the state's input and
output vectors (B, C), and steps (dt); so are the convolution's. Distributed checkpoints have a tensor for
each kind, named by its letter, and so has this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from types import MappingProxyType

from torch import Tensor

from megazero.checkpoint.naming import TensorRule, of_kinds
from megazero.config.fields import names_with
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.roles import Role
from megazero.formats.hf.state_space import mixer
from megazero.formats.megatron.dialects import UNSET, Arguments, ModelFields
from megazero.formats.megatron.weights import Weights
from megazero.spec.model import LayerSpec

_SAID = ("hybrid_layer_pattern", "hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")
_SIZES = names_with(Role.MAMBA)
_IGNORED = names_with(Role.HYBRIDS_IGNORE)
_EPSILON = 1e-5
"""The epsilon of the norms in Core's mixers, which no argument changes."""

_LETTERS = MappingProxyType({"gates": "z", "inputs": "x", "writing": "B", "reading": "C", "steps": "dt"})
_CONVOLVED = ("x", "B", "C")
_KIND = re.compile(r", (\w+)$")
_FUSED = re.compile(r"(.*\.mixer\.)(in_proj\.weight|conv1d\.(?:weight|bias))")


def alone_in(letters: str) -> Callable[[LayerSpec], bool]:
    """Whether a tensor is present: in layers whose only part has one of these letters."""
    present = of_kinds(letters)
    return lambda layer: layer.sides == 1 and present(layer)


def with_both(layer: LayerSpec) -> bool:
    """Whether a tensor is present: in layers with attention and an MLP."""
    return layer.sides > 1


def mixer_rules(theirs: str) -> Iterator[tuple[TensorRule, str]]:
    """The rules of a mixer whose names begin with `theirs`, each with the dim that ranks split."""
    for rule in mixer(theirs)[0]:
        name = _KIND.sub(lambda match: f".{_LETTERS[match[1]]}", rule.theirs)
        yield (
            TensorRule(rule.ours, rule.dims, name, rule.their_dims, rule.take, layer=of_kinds("M")),
            "G" if "G" in rule.dims else "M",
        )


def kind_by_kind(weights: Weights) -> Weights:
    """A rank's tensors, with projections and convolutions of mixers split into one tensor per kind.

    The number of rows of each kind follows from the shapes of the rank's own tensors.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _FUSED.fullmatch(name)
        rows = _rows(weights, match[1]) if match else {}
        if match and match[2].startswith("conv1d"):
            rows = {kind: rows[kind] for kind in _CONVOLVED if rows}
        if not rows or tensor.dim() == 0 or tensor.shape[0] != sum(rows.values()):
            out[name] = tensor
            continue
        pieces = tensor.split([*rows.values()])
        out |= {f"{name}.{kind}": piece for kind, piece in zip(rows, pieces, strict=True)}
    return out


def _rows(weights: Weights, prefix: str) -> dict[str, int]:
    """Letter of a kind -> its rows in this rank's projection; empty if the tensors are no mixer's."""
    names = ("in_proj.weight", "conv1d.bias", "A_log")
    rows = [
        weights[prefix + n].shape[0] for n in names if prefix + n in weights and weights[prefix + n].dim()
    ]
    if len(rows) < len(names):
        return {}
    projected, convolved, heads = rows  # z + x + B + C + dt, x + B + C, and one dt for each head
    width = projected - convolved - heads
    if not 1 <= width < convolved:
        return {}
    vectors = (convolved - width) // 2
    return dict(zip(_LETTERS.values(), (width, width, vectors, vectors, heads), strict=True))


def is_hybrid(names: Collection[str], arguments: Arguments) -> bool:
    """Whether a model is a hybrid, by its tensors or by Megatron's arguments."""
    said = any(arguments.get(name) not in (*UNSET, 0) for name in ("is_hybrid_model", *_SAID))
    return said or any(".mixer." in name for name in names)


def hybrid_settings(names: Collection[str], arguments: Arguments) -> ModelFields:
    """A hybrid's settings of layers and sizes; empty for other models.

    Args:
        names: Core's names of the tensors.
        arguments: Megatron's arguments.

    Raises:
        ValueError: an argument is set that Core ignores in hybrids, or that megazero lacks.
    """
    if not is_hybrid(names, arguments):
        return {}
    for name in _IGNORED:
        if arguments.get(name) not in UNSET:
            raise ValueError(f"`{name}` is {arguments[name]!r}, which hybrids ignore in part (unset it)")
    if (freq := arguments.get("moe_layer_freq")) not in (None, 1):
        raise ValueError(f"`moe_layer_freq` is {freq!r}, which hybrids ignore (unset it)")
    if arguments.get("position_embedding_type") == "yarn":
        raise ValueError("`position_embedding_type` is 'yarn', which hybrids ignore (say 'none')")
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern") or ""
    if not isinstance(pattern, str):
        raise ValueError(f"`hybrid_layer_pattern` is {pattern!r}, which is no text")
    epsilon = arguments.get("layernorm_epsilon") or arguments.get("norm_epsilon") or _EPSILON
    mixers = "M" in pattern or any(".mixer." in name for name in names)
    if epsilon != _EPSILON and mixers:
        raise ValueError(f"`layernorm_epsilon` is {epsilon!r} beside mixers, whose norms have {_EPSILON}")
    fields: ModelFields = {"is_hybrid_model": True}
    fields |= {name: arguments[name] for name in _SIZES if arguments.get(name) is not None}
    if pattern:
        if len(pattern) != (layers := arguments.get("num_layers")) and {*pattern} <= {*"M*-E"}:
            raise ValueError(f"`num_layers` is {layers!r} beside a pattern of {len(pattern)} letters")
        return {**fields, "hybrid_layer_pattern": pattern}
    ratios = {name: arguments[name] for name in _SAID[2:] if arguments.get(name)}
    return {**fields, **ratios}


def hybrid_arguments(model: ModelConfig) -> dict[str, object]:
    """Megatron's arguments for a hybrid; empty for other models."""
    if not model.is_hybrid_model:
        return {}
    sizes = {name: getattr(model, name) for name in _SIZES}
    return {**sizes, "is_hybrid_model": True, "hybrid_override_pattern": model.layer_kinds}
