"""Rules for linear layers from a script or a model, instead of those of a family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from megazero.deepspeed.tensor_parallel.layers import is_linear
from megazero.errors import ConfigError

FUSED_NAMES = ("qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "qkv", "gate_up_proj", "in_proj")
"""Layers of several fused weights, whose layout does not follow from the name."""

Kind = Literal["column", "row", "whole", "shared", "experts"]


@dataclass(frozen=True)
class SlicingRule:
    """How one module is sliced.

    Attributes:
        kind: ``column`` slices outputs, ``row`` inputs and ``experts`` the features of stacked experts; with
            ``whole`` and ``shared`` each rank keeps all weights, and ``shared`` sums their gradients.
        pieces: the number of equal pieces that make up the outputs, or the width of each piece.
        gather: whether forward gathers the outputs of all ranks.
    """

    kind: Kind
    pieces: int | tuple[int, ...] = 1
    gather: bool = False


@dataclass(frozen=True)
class SpecEntry:
    """An entry of ``partition_config.layer_specs``: a rule for the weights that match its patterns."""

    patterns: tuple[str, ...]
    rule: SlicingRule
    model_types: tuple[str, ...] = ()

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> SpecEntry:
        """Read an entry of the JSON.

        Raises:
            ConfigError: a key or a value is unknown.
        """
        known = {"patterns", "partition_type", "shape", "partition_dim", "model_types"}
        known |= {"gather_output", "grad_allreduce"}
        if unknown := sorted(set(entry) - known):
            raise ConfigError(
                f"`layer_specs` must have the keys {', '.join(sorted(known))}, but has {unknown[0]}; leave "
                "it out"
            )
        patterns = entry.get("patterns") or ()
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        kinds: dict[str, Kind] = {"column": "column", "row": "row", "skip": "whole"}
        kind = kinds.get(str(entry.get("partition_type", "column")).lower())
        if not patterns or kind is None:
            raise ConfigError(
                "`layer_specs` must have `patterns` and a `partition_type` of column, row or skip, but an "
                f"entry is {dict(entry)}"
            )
        if kind == "whole" and entry.get("grad_allreduce"):
            kind = "shared"
        pieces = _pieces(entry.get("shape"), entry.get("partition_dim"), kind)
        types = tuple(entry.get("model_types") or ())
        return cls(patterns, SlicingRule(kind, pieces, bool(entry.get("gather_output"))), types)

    def matches(self, path: str, model_type: str | None) -> bool:
        """Whether the entry applies to the weight of the module at `path`."""
        if self.model_types and model_type not in self.model_types:
            return False
        return any(re.match(pattern, f"{path}.weight") for pattern in self.patterns)


def _pieces(shape: Sequence[object] | None, dim: object, kind: Kind) -> int | tuple[int, ...]:
    """Return the number or the widths of the pieces of a weight viewed as `shape` and sliced along `dim`."""
    if shape is None:
        return 1
    sizes = [tuple(size) if isinstance(size, (list, tuple)) else size for size in shape]
    if kind != "column" or dim not in (None, 0, 1) or (dim == 1 and len(sizes) < 3):
        raise ConfigError(
            "`shape` must be of a column-parallel layer that is sliced along `partition_dim` 0 (or 1 of "
            f"three dims), but is {shape} with `partition_dim` {dim}; leave it out"
        )
    first = sizes[0]
    if isinstance(first, tuple):
        return first
    return first if isinstance(first, int) and first > 0 else 1


_STYLES: Mapping[str, SlicingRule] = MappingProxyType(
    {
        "colwise": SlicingRule("column"),
        "packed_colwise": SlicingRule("column", 2),
        "colwise_rep": SlicingRule("column", gather=True),
        "colwise_gather_output": SlicingRule("column", gather=True),
        "rowwise": SlicingRule("row"),
        "rowwise_split_input": SlicingRule("whole"),  # its inputs are not sliced
        "replicated_with_grad_allreduce": SlicingRule("shared"),
        "embedding_rowwise": SlicingRule("whole"),
        "moe_tp_experts": SlicingRule("experts"),
    }
)


def plan_rules(model: nn.Module, plan: Mapping[str, str]) -> dict[str, SlicingRule]:
    """Return path -> rule by a model's own `tp_plan`, ``{"layers.*.self_attn.q_proj": "colwise", ...}``.

    Raises:
        ConfigError: a style of the plan is unknown.
    """
    rules: dict[str, SlicingRule] = {}
    patterns = {re.compile(re.escape(name).replace(r"\*", r"[^.]+")): style for name, style in plan.items()}
    for path, module in model.named_modules():
        styles = [style for pattern, style in patterns.items() if pattern.fullmatch(path)]
        if not styles:
            continue
        if styles[0] not in _STYLES:
            raise ConfigError(
                f"`tp_plan` must have styles among {', '.join(_STYLES)}, but `{path}` has {styles[0]}; give "
                "`partition_config`"
            )
        rule = _STYLES[styles[0]]
        if rule.kind == "column" and not rule.gather and rule.pieces == 1 and _is_fused(path):
            raise _fused(path, module)
        rules[path] = rule
    return rules


def injected_rules(model: nn.Module, policy: Mapping[object, object]) -> dict[str, SlicingRule]:
    """Return path -> rule by an injection policy, ``{LayerClass: ("attn.out_proj", "mlp.fc2")}``.

    In modules of that class, the named linear layers are row-parallel and all others column-parallel.

    Raises:
        ConfigError: the policy has another form or matches no module, or a layer is fused.
    """
    rules: dict[str, SlicingRule] = {}
    for kind, names in policy.items():
        names = (names,) if isinstance(names, str) else names
        if not isinstance(kind, (type, str)) or not isinstance(names, Sequence):
            raise ConfigError(
                "`injection_policy` must map a class of layers to the names of those whose products are "
                f"summed, but holds {kind}: {names}"
            )
        for block_path, block in model.named_modules():
            matches = type(block).__name__ == kind if isinstance(kind, str) else isinstance(block, kind)
            if not matches:
                continue
            for name, module in block.named_modules():
                path = f"{block_path}.{name}" if block_path else name
                if not name or not is_linear(module):
                    continue
                if any(f".{name}".endswith(f".{row.removeprefix('.')}") for row in names):
                    rules[path] = SlicingRule("row")
                elif _is_fused(path):
                    raise _fused(path, module)
                else:
                    rules[path] = SlicingRule("column")
        if not any(rule.kind == "row" for rule in rules.values()):
            raise ConfigError(
                f"`injection_policy` must name layers of `model`, but {kind} with {', '.join(names)} fits "
                "none"
            )
    return rules


def spec_rules(
    model: nn.Module, specs: Sequence[SpecEntry], model_type: str | None
) -> Iterator[tuple[str, SlicingRule]]:
    """Yield the path and the rule of each module that an entry matches; the first match decides."""
    for path, module in model.named_modules():
        if not hasattr(module, "weight"):
            continue
        rule = next((spec.rule for spec in specs if spec.matches(path, model_type)), None)
        if rule is not None:
            yield path, rule


def _is_fused(path: str) -> bool:
    return path.rpartition(".")[2] in FUSED_NAMES


def _fused(path: str, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"`{path}` must be a layer of one weight, but by its name it holds several, and no rule for "
        f"{type(module).__name__} describes their layout; describe it in `partition_config` with a `shape`"
    )
