"""The torch optimizer that a JSON names: DeepSpeed's own in any case, or a class of torch.optim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from megazero.config.deepspeed.extras import Named
from megazero.config.deepspeed.section import AUTO
from megazero.deepspeed.optimizers.adam import FusedAdam
from megazero.deepspeed.optimizers.fused import COMPRESSED, CompressedOptimizer, FusedLamb, FusedLion
from megazero.deepspeed.optimizers.muon import MUON_OPTIMIZER, split_by_mark
from megazero.deepspeed.schedules.choose import fit
from megazero.errors import ConfigError

LAMB_OPTIMIZER = "lamb"
"""What a JSON calls LAMB, as scripts import it."""
_OWN: Mapping[str, Any] = MappingProxyType(
    {
        "adam": FusedAdam,
        "adamw": FusedAdam,
        "lion": FusedLion,
        "fusedlion": FusedLion,
        LAMB_OPTIMIZER: FusedLamb,
        "fusedlamb": FusedLamb,
        "adagrad": torch.optim.Adagrad,
    }
)
_ONE_BIT: Mapping[str, Any] = MappingProxyType(
    {"onebitadam": "onebit-adam", "zerooneadam": "zero-one-adam", "onebitlamb": "onebit-lamb"}
)
_MUON_OWN = ("momentum", "nesterov", "weight_decay")
_MUON_REST = ("betas", "eps", "weight_decay")
_ELSEWHERE = frozenset({"max_grad_norm", "fp32_optimizer_states", "cuda_aware", "comm_backend_name"})
"""Arguments that no class takes: the engine clips, moments are fp32, and bits travel over its groups."""
_VARIANTS_OFF: Mapping[str, Any] = MappingProxyType({"eps_inside_sqrt": False, "amsgrad": False})


def of_json(named: Named, params: Sequence[Any]) -> torch.optim.Optimizer:
    """The optimizer that a JSON names, over parameters or parameter groups.

    Raises:
        ConfigError: there is no such optimizer, it takes other arguments, or its learning rate is open.
    """
    given = {key: value for key, value in named.params.items() if key not in _ELSEWHERE}
    if given.get("lr") == AUTO:
        raise ConfigError(
            '`optimizer.params.lr` must be a number where a script builds the model, but is "auto"; '
            "write it down"
        )
    name = named.type.lower()
    if name == MUON_OPTIMIZER:
        return _muon(given, params)
    if name in _ONE_BIT:
        return _one_bit(named.type, _ONE_BIT[name], given, params)
    kind = _class_of(named.type, given)
    fit(kind, given, "optimizer", named.type)
    made: torch.optim.Optimizer = kind(params, **given)
    return made


def _class_of(name: str, given: dict[str, Any]) -> Any:
    """The class of a name; takes those arguments out of `given` that only say which one it is."""
    own = name.lower()
    if own in ("adam", "adamw"):
        decoupled = bool(given.pop("adam_w_mode", True)) or own == "adamw"
        if given.pop("torch_adam", False):
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        given["adam_w_mode"] = decoupled
    if own in _OWN:
        return _OWN[own]
    named = {key.lower(): key for key in vars(torch.optim)}
    kind = getattr(torch.optim, name, None) or getattr(torch.optim, named.get(own, ""), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            "`optimizer.type` must be Adam, AdamW, Lamb, Lion, Adagrad, Muon, OneBitAdam, ZeroOneAdam, "
            f"OneBitLamb or a class of torch.optim, but is {name}; pass your own as `optimizer`"
        )
    return kind


def _one_bit(name: str, kind: Any, given: Mapping[str, Any], params: Sequence[Any]) -> torch.optim.Optimizer:
    given = {key: value for key, value in given.items() if (key, value) not in _VARIANTS_OFF.items()}
    strange = [key for key in given if key != "lr" and key not in COMPRESSED[kind]]
    if strange:
        raise ConfigError(
            f"`optimizer.params` of {name} must be among lr, {', '.join(COMPRESSED[kind])}, but has "
            f"{', '.join(strange)}; leave these out"
        )
    return partial(CompressedOptimizer, kind)(params, **given)


def _muon(given: Mapping[str, Any], params: Sequence[Any]) -> torch.optim.Optimizer:
    known = {"lr", "muon_lr", "adam_lr", "ns_method", *_MUON_OWN, *_MUON_REST}
    off: Mapping[str, Any] = {"adam_w_mode": True, "per_head_muon": False}
    strange = [key for key, value in given.items() if key not in known and (key, value) not in off.items()]
    if strange:
        raise ConfigError(
            f"`optimizer.params` of Muon must be among {', '.join(sorted(known))}, but has "
            f"{', '.join(strange)}; leave these out"
        )
    moments = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    halves = ("muon_lr", {"weight_decay": 0.0}, _MUON_OWN), ("adam_lr", moments, _MUON_REST)
    muon, rest = (
        default
        | {key: given[key] for key in keys if key in given}
        | ({"lr": given[rate]} if (rate := own if own in given else "lr") in given else {})
        for own, default, keys in halves
    )
    return split_by_mark(params, muon, rest)
