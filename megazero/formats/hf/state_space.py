"""The common tables of architectures with Mamba-2 mixers: tensors, settings and conditions.

megazero's projection has group after group of heads, each with its gates, inputs, B, C and steps, so that
tensor-parallel ranks can split groups. transformers' has the gates of all groups, then all inputs, and so on.
So one tensor of transformers concatenates several parts of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from megazero.checkpoint.naming import Sizes, Take, TensorRule, of_kinds
from megazero.formats.hf.architecture import COMMON_LIMITS, FieldPair, Json, JsonObject, Limit

Fused = tuple[tuple[str, tuple[str, ...]], ...]

STEP_LIMITS = "time_step_limit"
OURS_FIXED = (
    ("family", "gpt"),
    ("is_hybrid_model", True),
    ("normalization", "RMSNorm"),
)
LIMITS = (
    *COMMON_LIMITS,
    Limit(lambda m: m.mamba_heads is not None, "there must be Mamba-2 layers"),
    Limit(lambda m: (m.mamba_heads or 0) % m.mamba_num_groups == 0, "groups must have equally many heads"),
)
EXPANDED_LIMITS = (
    *LIMITS,
    Limit(
        lambda m: m.mamba_width % m.hidden_size == 0,
        "a mixer's channels must be a multiple of the hidden size",
    ),
)


def _bounds(dim: str, sizes: Sizes) -> tuple[int, ...]:
    """Offsets of the kinds in a group's part of the convolution (C) or projection (R), and their end."""
    width, channels = sizes["W"], sizes["C"]
    mixed = (width, (width + channels) // 2, channels)
    return (0, *mixed) if dim == "C" else (0, width, *(width + end for end in mixed), sizes["R"])


def _kind(dim: str, number: int) -> Callable[[Sizes], Take]:
    def take(sizes: Sizes) -> Take:
        return dim, slice(*_bounds(dim, sizes)[number : number + 2])

    return take


_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"R": ("gates", "inputs", "writing", "reading", "steps"), "C": ("inputs", "writing", "reading")}
)


def mixer(theirs: str) -> tuple[tuple[TensorRule, ...], Fused]:
    """The rules of a mixer whose names begin with `theirs`, and `Architecture.fused` for it."""
    rules: list[TensorRule] = []
    fused: list[tuple[str, tuple[str, ...]]] = []
    for ours, dims, name, their_dims in (
        ("input.weight", "G R h", "in_proj.weight", "(G R) h"),
        ("conv.weight", "G C 4", "conv1d.weight", "(G C) () 4"),
        ("conv.bias", "G C", "conv1d.bias", "(G C)"),
    ):
        parts = []
        for number, kind in enumerate(_KINDS[dims[2]]):
            parts.append(f"{theirs}.{name}, {kind}")
            take = _kind(dims[2], number)
            rules.append(TensorRule(f"layers.{{i}}.mamba.{ours}", dims, parts[-1], their_dims, take))
        fused.append((f"{theirs}.{name}", tuple(parts)))
    for ours, dims, name in (
        ("dt_bias", "G H", "dt_bias"),
        ("a_log", "G H", "A_log"),
        ("skip", "G H", "D"),
        ("norm.weight", "G W", "norm.weight"),
    ):
        rules.append(TensorRule(f"layers.{{i}}.mamba.{ours}", dims, f"{theirs}.{name}", f"({dims})"))
    rules.append(TensorRule("layers.{i}.mamba.output.weight", "h M", f"{theirs}.out_proj.weight", "h M"))
    return tuple(replace(rule, layer=of_kinds("M")) for rule in rules), tuple(fused)


def shape(heads: str, width: str, states: str, groups: str) -> tuple[FieldPair, ...]:
    """The settings of mixers, given their names in ``config.json``; defaults are Mamba-2's."""
    return (
        FieldPair(heads, "mamba_num_heads", 128, resolved="mamba_heads"),
        FieldPair(width, "mamba_head_dim", 64),
        FieldPair(states, "mamba_state_dim", 128),
        FieldPair(groups, "mamba_num_groups", 8),
    )


def least_step(config: Json) -> float:
    """The shortest step (dt) that ``config.json`` allows.

    Raises:
        ValueError: there is a longest step too, which is not supported, or there are not two limits.
    """
    limits = config.get(STEP_LIMITS)
    if limits is None:
        return 0.0
    least, most = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    most = most.get("__float__") if isinstance(most, dict) else most  # so version 5 writes infinity
    if (
        not isinstance(least, int | float)
        or isinstance(least, bool)
        or most not in ("Infinity", float("inf"))
    ):
        raise ValueError(
            f"`{STEP_LIMITS}` must be a shortest step and Infinity, but is {limits!r:.80}; no "
            "other limits of steps are supported"
        )
    return float(least)


PATTERN = "hybrid_layer_pattern"
LETTERS = FieldPair(PATTERN, PATTERN, None, str, resolved="layer_kinds")
"""The letter of each layer, under a name that no ``config.json`` has; `Architecture.plain` fills it in."""

LEAST_STEP = FieldPair(STEP_LIMITS, "mamba_min_step", 0.0)
"""The shortest step, as `least_step` gives it."""


def plain_mixers(config: Json, expand: str, heads: str, width: str) -> JsonObject:
    """Replace the limits of steps by `least_step`.

    Args:
        config: the fields of ``config.json``.
        expand, heads, width: the names of its fields for a mixer's expansion, heads and channels of a head.

    Raises:
        ValueError: see `least_step`; or a mixer is not as wide as its heads, which transformers refuses too.
    """
    names = expand, "hidden_size", heads, width
    sizes = [config.get(name, default) for name, default in zip(names, (2, 4096, 128, 64), strict=True)]
    for name, size in zip(names, sizes, strict=True):
        if type(size) is not int:
            raise ValueError(f"`{name}` must be a number, but is {size!r:.40}")
    if sizes[0] * sizes[1] != sizes[2] * sizes[3]:
        raise ValueError(
            f"`{expand}` x `hidden_size` must be `{heads}` x `{width}`, but are {sizes[0]} x {sizes[1]} and "
            f"{sizes[2]} x {sizes[3]}"
        )
    return {**config, STEP_LIMITS: least_step(config)}


def complete_mixers(config: Json, expand: str, heads: str, width: str) -> JsonObject:
    """The inverse of `plain_mixers`: write the expansion, and two limits of steps if there is a shortest."""
    out = {**config, expand: config[heads] * config[width] // config["hidden_size"]}
    least = out.pop(STEP_LIMITS)
    return {**out, STEP_LIMITS: [least, float("inf")]} if least else out
