"""Muon for matrices beside AdamW for the rest, as one torch optimizer for `megazero.initialize`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazero.deepspeed.optimizers.fused import RuleOptimizer
from megazero.errors import ConfigError
from megazero.optim.elementwise import Adam
from megazero.optim.muon import Muon, NewtonSchulz
from megazero.optim.rule import UpdateRule

MUON_OPTIMIZER = "muon"
"""What a JSON calls Muon."""
_ADAM = MappingProxyType({"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0})
_EPS = 1e-7


class MuonWithAuxAdam(RuleOptimizer):
    """Muon and the AdamW beside it, under the name of Jordan et al.'s class.

    Args:
        param_groups: groups with ``use_muon``: true for matrices, with `lr`, `momentum` and `weight_decay`;
            false for all other parameters, with `lr`, `betas`, `eps` and `weight_decay`.

    Raises:
        ConfigError: a group lacks ``use_muon``, or one for Muon has parameters that are not matrices.
    """

    name = "MuonWithAuxAdam"

    def __init__(self, param_groups: Iterable[Mapping[str, Any]]):
        groups = []
        for number, group in enumerate(param_groups):
            if not isinstance(group.get("use_muon"), bool):
                raise ConfigError(
                    f"`use_muon` of parameter group {number} must be true or false, but is "
                    f"{group.get('use_muon')}; say whether Muon or AdamW updates the group"
                )
            muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
            groups.append({**(muon if group["use_muon"] else {"lr": 3e-4, **_ADAM}), **group})
        super().__init__(groups, {})
        _check_matrices([group for group in self.param_groups if group["use_muon"]])

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        return muon_of(group, {}) if group["use_muon"] else muon_of({"momentum": 0.0}, group).rest


def mark_matrices(model: nn.Module) -> None:
    """Set `use_muon` where it is missing: whether Muon is to update a parameter, as DeepSpeed decides.

    Muon is for matrices whose names have neither ``embed`` nor ``lm_head`` in them.
    """
    for name, param in model.named_parameters():
        if not isinstance(getattr(param, "use_muon", None), bool):
            inner = not any(word in name.lower() for word in ("embed", "lm_head"))
            param.__dict__["use_muon"] = param.dim() == 2 and inner


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Mark a model's parameters as a `DeepSpeedConfig` needs it: for Muon, see `mark_matrices`."""
    if config_class.optimizer_name == MUON_OPTIMIZER:
        mark_matrices(model)


def split_by_mark(params: Sequence[Any], muon: Mapping[str, Any], rest: Mapping[str, Any]) -> MuonWithAuxAdam:
    """Split parameters by their attribute `use_muon`, DeepSpeed's way to say which of them Muon updates.

    Args:
        params: parameters or parameter groups.
        muon: the options of the parameters whose mark is true.
        rest: the options of the others.

    Raises:
        ConfigError: a parameter is without the mark.
    """
    given = [dict(item) if isinstance(item, Mapping) else {"params": [item]} for item in params]
    if all(isinstance(item, nn.Parameter) for item in params):
        given = [{"params": list(params)}]
    groups = []
    for group in given:
        members = list(group.pop("params"))
        unmarked = [param for param in members if not isinstance(getattr(param, "use_muon", None), bool)]
        if unmarked:
            raise ConfigError(
                f"`use_muon` must be set on every parameter for Muon, but {len(unmarked)} of "
                f"{len(members)} lack it; set it to true on matrices between hidden vectors, and to "
                "false on embeddings, heads, norms and biases"
            )
        for use_muon, options in ((True, muon), (False, rest)):
            chosen = [param for param in members if param.use_muon is use_muon]
            if chosen:
                groups.append({**options, **group, "params": chosen, "use_muon": use_muon})
    return MuonWithAuxAdam(groups)


def matrix_groups(client: torch.optim.Optimizer) -> frozenset[int]:
    """Numbers of the groups whose parameters are updated as whole matrices."""
    whole = isinstance(client, torch.optim.Muon)
    mixed = isinstance(client, MuonWithAuxAdam)
    return frozenset(
        number for number, group in enumerate(client.param_groups) if whole or (mixed and group["use_muon"])
    )


def muon_of(group: Mapping[str, Any], rest: Mapping[str, Any]) -> Muon:
    """The rule that a group of `torch.optim.Muon` or `MuonWithAuxAdam`, and one of its AdamW's, describe.

    Raises:
        ConfigError: `eps` of torch's Muon is not its default.
    """
    if group.get("eps", _EPS) != _EPS:
        raise ConfigError(f"`eps` of Muon must be {_EPS}, but is {group['eps']}; leave it out")
    spectral = group.get("adjust_lr_fn") == "match_rms_adamw"
    options = {**_ADAM, **rest}
    return Muon(
        momentum=group["momentum"],
        nesterov=group.get("nesterov", True),
        orthogonalized=NewtonSchulz(
            (tuple(group.get("ns_coefficients", (3.4445, -4.7750, 2.0315))),), group.get("ns_steps", 5)
        ),
        scale="spectral" if spectral else "shape_scaling",
        extra_scale=0.2 if spectral else 1.0,
        rest=Adam(float(options["betas"][0]), float(options["betas"][1]), options["eps"]),
    )


def _check_matrices(groups: Sequence[Mapping[str, Any]]) -> None:
    for group in groups:
        wrong = [tuple(param.shape) for param in group["params"] if param.dim() != 2]
        if wrong:
            raise ConfigError(
                f"`use_muon` must be false for parameters that are not matrices, but is true for one of "
                f"shape {wrong[0]}; leave it to AdamW"
            )
