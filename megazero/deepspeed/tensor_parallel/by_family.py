"""Slicing a model of a known family, by the family's row in the table."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from megazero.deepspeed.tensor_parallel.by_rules import slice_by_rules, width_of
from megazero.deepspeed.tensor_parallel.cutter import Cutter
from megazero.deepspeed.tensor_parallel.families import ModelFamily
from megazero.deepspeed.tensor_parallel.heads import Heads, heads_of
from megazero.deepspeed.tensor_parallel.layers import HeadRows, is_linear
from megazero.deepspeed.tensor_parallel.rules import SlicingRule
from megazero.deepspeed.tensor_parallel.slices import WeightPiece
from megazero.errors import ConfigError


def blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module of each block: the members of the outermost module lists."""
    lists: list[str] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
            yield from ((f"{path}.{name}", block) for name, block in module.named_children())


_KINDS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys(("query", "key_value", "up", "fused"), "column"), "output": "row", "down": "row"}
)
"""Role of a module -> the kind of a script's rule that says the same; all other roles are "whole"."""


def slice_family(
    cutter: Cutter, family: ModelFamily, rules: Mapping[str, SlicingRule] = MappingProxyType({})
) -> None:
    """Slice the blocks and the output layer of a model.

    Args:
        cutter: slices modules of the model.
        family: the model's family.
        rules: path -> the script's own rule, which overrides the family's.

    Raises:
        ConfigError: the family's row does not name a layer, or a layer has another layout than the row says.
    """
    model: Any = cutter.model
    config = model.config
    if getattr(config, "slow_but_exact", False):
        raise ConfigError("`slow_but_exact` must be false for sliced layers, but is true; leave it out")
    heads = heads_of(config, cutter.group.size, cutter.group.rank)
    if not any(entry.endswith(("=groups", "=key_value")) for entry in family.attributes):
        heads = replace(heads, key_value=heads.query)
    plan = FamilyPlan(cutter, family, heads, config)
    for path, block in list(blocks(model)):
        plan.check(path, block)
    if not plan.roles:
        raise ConfigError(
            f"`model` must have the layers of {family.family}, but {type(model).__name__} has none; "
            "give `partition_config`"
        )
    own = {path: rule for path, rule in rules.items() if not plan.agrees(path, rule)}
    for path, role in plan.roles.items():
        if path not in own:
            getattr(plan, role)(path)
    plan.adjust()
    slice_by_rules(cutter, own, divide=False)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    ruled = any(model.get_submodule(path) is head for path in rules)
    if isinstance(head, nn.Linear) and not ruled:
        cutter.head(model.get_input_embeddings(), head)


class FamilyCuts:
    """One method for each `Role`, which slices a module of that role.

    Args:
        cutter: slices modules of the model.
        family: the model's family.
        heads: the model's heads.
        config: the model's Hugging Face configuration.
    """

    def __init__(self, cutter: Cutter, family: ModelFamily, heads: Heads, config: Any):
        self.cutter, self.family, self.config = cutter, family, config
        self.roles: dict[str, str] = {}
        fused = [entry.partition("=")[0] for entry in family.names["fused"]]
        self.heads = replace(heads, may_share=all(family.layout(name, config) != "heads" for name in fused))

    def query(self, path: str) -> None:
        """Slice queries by whole groups of heads."""
        self.cutter.column(path, (self._queries(),))

    def key_value(self, path: str) -> None:
        """Slice keys or values."""
        self.cutter.column(path, (self._keys(),))

    def fused(self, path: str) -> None:
        """Slice fused queries, keys and values."""
        heads = self.heads
        if self.family.layout(path, self.config) == "thirds":
            pieces: tuple[WeightPiece, ...] = (self._queries(), self._keys(), self._keys())
        else:
            pieces = (WeightPiece((heads.query + 2 * heads.key_value) * heads.width, heads.key_value),)
        self.cutter.column(path, pieces)

    def output(self, path: str) -> None:
        """Slice the inputs of attention's output projection."""
        self.cutter.row(path, self._queries())

    def up(self, path: str) -> None:
        """Slice the hidden features of an MLP."""
        self.cutter.column(path, (self._features(path, outputs=True),))

    def halves(self, path: str) -> None:
        """Slice two fused MLP weights."""
        both = self._features(path, outputs=True)
        half = WeightPiece(both.width // 2, both.width // 2)
        self.cutter.column(path, (half, half))

    def down(self, path: str) -> None:
        """Slice the inputs of an MLP's second layer."""
        self.cutter.row(path, self._features(path, outputs=False))

    def experts(self, path: str) -> None:
        """Slice the hidden features of stacked experts."""
        self.cutter.experts(path, self.config.hidden_size)

    def tables(self, path: str) -> None:
        """Slice an embedding with a column for each head."""
        heads = self.heads
        weight = self.cutter.model.get_parameter(f"{path}.weight")
        self.cutter.parameter(f"{path}.weight", weight, 1, (WeightPiece(heads.query, heads.units),))

    def whole(self, path: str) -> None:
        """Keep the module whole on each rank."""

    def shared(self, path: str) -> None:
        """Mark weights that all heads share."""
        self.cutter.shared(path)

    def _queries(self) -> WeightPiece:
        return WeightPiece(self.heads.query * self.heads.width, self.heads.units)

    def _keys(self) -> WeightPiece:
        heads = self.heads
        return WeightPiece(
            heads.key_value * heads.width, heads.key_value, heads.used if heads.shared else None
        )

    def _features(self, path: str, outputs: bool) -> WeightPiece:
        width = width_of(self.cutter.model.get_submodule(path), outputs)
        if width % self.cutter.group.size:
            _check_activation(self.config, path)
        return WeightPiece(width, width)


class FamilyPlan(FamilyCuts):
    """Finds the roles of a model's modules; the arguments are those of `FamilyCuts`."""

    def check(self, path: str, block: nn.Module) -> None:
        """Find the roles of a block's modules.

        Raises:
            ConfigError: a linear layer, or a module with weights beside the queries, has no role.
        """
        roles = {name: self.family.role(name) for name, _ in block.named_modules() if name}
        attentions = {self._parent(name) for name, role in roles.items() if role in ("query", "fused")}
        for name, module in block.named_modules():
            role = roles.get(name)
            owns = next(module.parameters(recurse=False), None) is not None
            beside = self._parent(name) in attentions and owns
            if role is None and (is_linear(module) or beside):
                raise ConfigError(
                    f"`{path}.{name}` must be a layer of {self.family.family} "
                    f"({', '.join(self.family.types)}), "
                    f"but no rule names this {type(module).__name__}; name it in `partition_config`"
                )
            if role is not None and not (role == "shared" and not owns):
                self.roles[f"{path}.{name}"] = role

    def agrees(self, path: str, rule: SlicingRule) -> bool:
        """Whether a script's rule slices the module as the family's row does."""
        plain = rule.pieces == 1 and not rule.gather
        return plain and _KINDS.get(self.roles.get(path, ""), "whole") == rule.kind

    def adjust(self) -> None:
        """Set the attention modules' numbers of heads, and slice their biases to the heads of this rank."""
        paths = {self._parent(path) for path, role in self.roles.items() if role in ("query", "fused")}
        heads = self.heads
        for path in sorted(paths):
            module = self.cutter.model.get_submodule(path)
            for entry in self.family.attributes:
                place, meaning = entry.split("=")
                owner, _, name = place.rpartition(".")
                if owner and hasattr(module, owner):
                    setattr(module, owner, copy.copy(getattr(module, owner)))  # other layers may share it
                target = getattr(module, owner, None) if owner else module
                if hasattr(target, name):
                    setattr(target, name, heads.value(meaning))
            for name in self.family.bias:
                rows = HeadRows(name, heads.query, heads.local_query * heads.rank, heads.local_query)
                module.register_forward_pre_hook(rows, with_kwargs=True)

    def _parent(self, path: str) -> str:
        return path.rpartition(".")[0]


def _check_activation(config: object, path: str) -> None:
    """Raise ConfigError if the activation is not zero at zero: padding features must stay zero."""
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn"):
        value = getattr(config, name, None)
        if isinstance(value, str) and ("sigmoid" in value or "softplus" in value):
            raise ConfigError(
                f"the features of `{path}` must be a multiple of the tensor-parallel ranks, because `{name}` "
                f"is {value}, which is not zero at zero; choose another number of ranks"
            )
