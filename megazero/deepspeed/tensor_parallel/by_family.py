"""Slicing a model of a known family, as its row of the table says."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from megazero.deepspeed.tensor_parallel.by_rules import slice_by_rules
from megazero.deepspeed.tensor_parallel.cutter import Cutter
from megazero.deepspeed.tensor_parallel.families import Family
from megazero.deepspeed.tensor_parallel.heads import Heads, heads_of
from megazero.deepspeed.tensor_parallel.layers import HeadRows, is_linear
from megazero.deepspeed.tensor_parallel.rules import Rule
from megazero.deepspeed.tensor_parallel.slices import Piece
from megazero.errors import ConfigError


def blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a model with their paths: the modules in the outermost lists."""
    lists: list[str] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
            yield from ((f"{path}.{name}", block) for name, block in module.named_children())


_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "query": "column",
        "key_value": "column",
        "up": "column",
        "output": "row",
        "down": "row",
        "fused": "column",
    }
)


def slice_family(cutter: Cutter, family: Family, rules: Mapping[str, Rule] = MappingProxyType({})) -> None:
    """Slice the blocks and the output layer of a model.

    Args:
        cutter: slices modules of the model.
        family: its row.
        rules: the script's own rules for some of its modules, which come first.

    Raises:
        ConfigError: a layer is not named by the family's row, or does not have the layout that it says.
    """
    model: Any = cutter.model
    config: Any = model.config
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
            f"`model` must have the layers of {family.family}, but {type(model).__name__} has none of them; "
            "give `partition_config`"
        )
    own = {path: rule for path, rule in rules.items() if not plan.agrees(path, rule)}
    for path, role in plan.roles.items():
        if path not in own:
            getattr(plan, role)(path)
    plan.adjust()
    slice_by_rules(cutter, own, divide=False)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    named = any(model.get_submodule(path) is head for path in rules)
    if isinstance(head, nn.Linear) and not named:
        cutter.head(model.get_input_embeddings(), head)


class FamilyCuts:
    """A method for each role, which slices a module.

    Args:
        cutter: slices modules of the model.
        family: the row of the model's family.
        heads: the model's heads.
        config: its configuration.
    """

    def __init__(self, cutter: Cutter, family: Family, heads: Heads, config: Any):
        self.cutter, self.family, self.config = cutter, family, config
        self.roles: dict[str, str] = {}
        between = any(
            family.layout(entry.partition("=")[0], config) == "heads" for entry in family.names["fused"]
        )
        self.heads = replace(heads, may_share=not between)

    def query(self, path: str) -> None:
        """Queries: whole groups of heads."""
        self.cutter.column(path, (self._queries(),))

    def key_value(self, path: str) -> None:
        """Keys or values."""
        self.cutter.column(path, (self._keys(),))

    def fused(self, path: str) -> None:
        """Queries, keys and values in one."""
        heads = self.heads
        if self.family.layout(path, self.config) == "thirds":
            pieces: tuple[Piece, ...] = (self._queries(), self._keys(), self._keys())
        else:
            pieces = (Piece((heads.query + 2 * heads.key_value) * heads.width, heads.key_value),)
        self.cutter.column(path, pieces)

    def output(self, path: str) -> None:
        """The layer after the heads."""
        self.cutter.row(path, self._queries())

    def up(self, path: str) -> None:
        """Features of an MLP."""
        self.cutter.column(path, (self._features(path, outputs=True),))

    def halves(self, path: str) -> None:
        """Two weights of an MLP in one."""
        both = self._features(path, outputs=True)
        half = Piece(both.width // 2, both.width // 2)
        self.cutter.column(path, (half, half))

    def down(self, path: str) -> None:
        """The layer after an MLP's features."""
        self.cutter.row(path, self._features(path, outputs=False))

    def experts(self, path: str) -> None:
        """The features of stacked experts."""
        self.cutter.experts(path, self.config.hidden_size)

    def tables(self, path: str) -> None:
        """A column for each head."""
        heads = self.heads
        weight = self.cutter.model.get_parameter(f"{path}.weight")
        self.cutter.parameter(f"{path}.weight", weight, 1, (Piece(heads.query, heads.units),))

    def whole(self, path: str) -> None:
        """Nothing: each rank computes all of it."""

    def shared(self, path: str) -> None:
        """Weights that are used for each head."""
        self.cutter.shared(path)

    def _queries(self) -> Piece:
        return Piece(self.heads.query * self.heads.width, self.heads.units)

    def _keys(self) -> Piece:
        heads = self.heads
        return Piece(heads.key_value * heads.width, heads.key_value, heads.used if heads.shared else None)

    def _features(self, path: str, outputs: bool) -> Piece:
        linear = self.cutter.model.get_submodule(path)
        shape = linear.get_parameter("weight").shape
        width = shape[0 if outputs == isinstance(linear, nn.Linear) else 1]
        if width % self.cutter.group.size:
            _check_activation(self.config, path)
        return Piece(width, width)


class FamilyPlan(FamilyCuts):
    """The roles of a model's modules. Arguments are those of `FamilyCuts`."""

    def check(self, path: str, block: nn.Module) -> None:
        """Find the roles of a block's modules.

        Raises:
            ConfigError: a linear layer, or a neighbour of the queries that has weights, has no role.
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

    def agrees(self, path: str, rule: Rule) -> bool:
        """Whether a rule of the script's own says no more than the family's row does."""
        plain = rule.pieces == 1 and not rule.gather
        return plain and _KINDS.get(self.roles.get(path, ""), "whole") == rule.kind

    def adjust(self) -> None:
        """Tell the attention modules how many heads they have, and give them the rows of these heads."""
        paths = {self._parent(path) for path, role in self.roles.items() if role in ("query", "fused")}
        heads = self.heads
        for path in sorted(paths):
            module = self.cutter.model.get_submodule(path)
            for entry in self.family.attributes:
                place, meaning = entry.split("=")
                owner, _, name = place.rpartition(".")
                if owner and hasattr(module, owner):
                    setattr(module, owner, copy.copy(getattr(module, owner)))
                target = getattr(module, owner, None) if owner else module
                if hasattr(target, name):
                    setattr(target, name, heads.value(meaning))
            for name in self.family.bias:
                rows = HeadRows(name, heads.query, heads.local_query * heads.rank, heads.local_query)
                module.register_forward_pre_hook(rows, with_kwargs=True)

    def _parent(self, path: str) -> str:
        return path.rpartition(".")[0]


def _check_activation(config: Any, path: str) -> None:
    """Features of zeros after the last one must stay zero."""
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn"):
        value = getattr(config, name, None)
        if isinstance(value, str) and ("sigmoid" in value or "softplus" in value):
            raise ConfigError(
                f"the features of `{path}` must be a multiple of the tensor-parallel ranks, because "
                f"`{name}` is "
                f"{value}, which is not zero at zero; choose another number of ranks"
            )
