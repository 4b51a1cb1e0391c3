"""Muon for matrices and AdamW for all other parameters, as one torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazero.deepspeed.optimizers.fused import Options, ParamGroups, RuleOptimizer
from megazero.errors import ConfigError
from megazero.optim.elementwise import Adam
from megazero.optim.muon import Muon, NewtonSchulz
from megazero.optim.rule import UpdateRule

MUON_OPTIMIZER = "muon"
"""The name of Muon in a JSON."""
_ADAM = MappingProxyType({"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0})
_EPS = 1e-7


class MuonWithAuxAdam(RuleOptimizer):
    """Muon for some parameter groups and AdamW for the others; the name is that of Jordan et al.'s class.

    Args:
        param_groups: groups with ``use_muon``: true for matrices, with `lr`, `momentum` and `weight_decay`;
            false for all other parameters, with `lr`, `betas`, `eps` and `weight_decay`.

    Raises:
        ConfigError: a group lacks ``use_muon``, or a group for Muon has a parameter that is no matrix.
    """

    name = "MuonWithAuxAdam"

    def __init__(self, param_groups: Iterable[Options]):
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

    def rule_of(self, group: Options) -> UpdateRule:
        return muon_of(group, {}) if group["use_muon"] else muon_of({"momentum": 0.0}, group).rest


def mark_matrices(model: nn.Module) -> None:
    """Set `use_muon` of each parameter that lacks it, by DeepSpeed's criterion.

    Muon updates matrices whose names contain neither ``embed`` nor ``lm_head``.
    """
    for name, param in model.named_parameters():
        if not isinstance(getattr(param, "use_muon", None), bool):
            inner = not any(word in name.lower() for word in ("embed", "lm_head"))
            param.__dict__["use_muon"] = param.dim() == 2 and inner


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Call `mark_matrices` if the optimizer of a `DeepSpeedConfig` is Muon."""
    if config_class.optimizer_name == MUON_OPTIMIZER:
        mark_matrices(model)


def split_by_mark(params: ParamGroups, muon: Options, rest: Options) -> MuonWithAuxAdam:
    """Split parameters by their attribute `use_muon` into groups for Muon and for AdamW.

    Args:
        params: parameters or parameter groups.
        muon: the options of parameters whose `use_muon` is true.
        rest: the options of all others.

    Raises:
        ConfigError: a parameter has no `use_muon`.
    """
    loose = [item for item in params if isinstance(item, nn.Parameter)]
    source: list[dict[str, Any]] = [{"params": loose}]
    source += [dict(item) for item in params if isinstance(item, Mapping)]
    groups = []
    for group in source:
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
    """The numbers of the parameter groups that are updated as whole matrices."""
    whole = isinstance(client, torch.optim.Muon)
    mixed = isinstance(client, MuonWithAuxAdam)
    return frozenset(
        number for number, group in enumerate(client.param_groups) if whole or (mixed and group["use_muon"])
    )


def muon_of(group: Options, rest: Options) -> Muon:
    """The rule for the options of a group of `torch.optim.Muon` or `MuonWithAuxAdam`, and of its AdamW group.

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


def _check_matrices(groups: Sequence[Options]) -> None:
    for group in groups:
        wrong = [tuple(param.shape) for param in group["params"] if param.dim() != 2]
        if wrong:
            raise ConfigError(
                f"`use_muon` must be false for parameters that are not matrices, but is true for one of "
                f"shape {wrong[0]}; leave it to AdamW"
            )
