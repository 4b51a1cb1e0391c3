"""Slicing a model of unknown family by rules for its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megazero.deepspeed.tensor_parallel.cutter import Cutter
from megazero.deepspeed.tensor_parallel.heads import heads_of
from megazero.deepspeed.tensor_parallel.layers import is_linear
from megazero.deepspeed.tensor_parallel.rules import SlicingRule
from megazero.deepspeed.tensor_parallel.slices import WeightPiece
from megazero.errors import ConfigError

_PER_RANK = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("hidden_size", "embed_dim", "all_head_size", "inner_dim", "split_size", "d_model"),
)
"""Attributes of attention modules and MLPs that become those of one rank."""


def slice_by_rules(cutter: Cutter, rules: Mapping[str, SlicingRule], *, divide: bool = True) -> None:
    """Slice the modules that have a rule.

    Args:
        cutter: slices modules of the model.
        rules: path -> rule.
        divide: whether to divide the sizes that modules with sliced outputs store as attributes.

    Raises:
        ConfigError: a size does not divide by the ranks, or a sliced module is no linear layer.
    """
    model, ranks = cutter.model, cutter.group.size
    config: Any = getattr(model, "config", None)
    if divide:
        _check_heads(config, ranks)
    owners = {path.rpartition(".")[0] for path, r in rules.items() if r.kind == "column" and not r.gather}
    for path, rule in rules.items():
        module = model.get_submodule(path)
        if rule.kind in ("column", "row") and not is_linear(module):
            raise ConfigError(
                f"`{path}` must be a linear layer to be sliced, but is a {type(module).__name__}; skip it"
            )
        if rule.kind == "column":
            cutter.column(path, _pieces(path, rule, module, ranks), gather=rule.gather)
        elif rule.kind == "row":
            width = width_of(module, outputs=False)
            _check_width(path, width, ranks)
            cutter.row(path, WeightPiece(width, width))
        elif rule.kind == "experts":
            cutter.experts(path, config.hidden_size)
        elif rule.kind == "shared":
            cutter.shared(path)
    for path in owners if divide else ():
        _divide_sizes(path, model.get_submodule(path), ranks)


def _pieces(path: str, rule: SlicingRule, module: nn.Module, ranks: int) -> tuple[WeightPiece, ...]:
    width = width_of(module, outputs=True)
    widths = (width // rule.pieces,) * rule.pieces if isinstance(rule.pieces, int) else rule.pieces
    for width in widths if not rule.gather else ():
        _check_width(path, width, ranks)
    return tuple(WeightPiece(width, width) for width in widths)


def width_of(module: nn.Module, outputs: bool) -> int:
    """Return the number of outputs, or else of inputs, of a linear layer, see `is_linear`."""
    shape = module.get_parameter("weight").shape
    return shape[0 if outputs == isinstance(module, nn.Linear) else 1]


def _check_width(path: str, width: int, ranks: int) -> None:
    if width % ranks:
        raise ConfigError(
            f"`{path}` must have a width that divides by the tensor-parallel ranks ({ranks}), but has "
            f"{width}; choose another number of ranks or skip the layer"
        )


def _check_heads(config: object, ranks: int) -> None:
    """Raise ConfigError if the heads of the configuration do not divide by the ranks."""
    if getattr(config, "num_attention_heads", None) is None:
        return
    heads = heads_of(config, ranks, 0)
    if heads.query % ranks or heads.key_value % ranks:
        raise ConfigError(
            f"`num_key_value_heads` ({heads.key_value}) and `num_attention_heads` ({heads.query}) must "
            f"divide by the tensor-parallel ranks ({ranks}) for a model of unknown family; choose another "
            "number of ranks"
        )


def _divide_sizes(path: str, module: nn.Module, ranks: int) -> None:
    for name in _PER_RANK:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            if value % ranks:
                raise ConfigError(
                    f"`{path}.{name}` must divide by the tensor-parallel ranks ({ranks}), but is {value}; "
                    "choose another number of ranks"
                )
            setattr(module, name, value // ranks)
