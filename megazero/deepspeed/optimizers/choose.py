"""Build the optimizer that a JSON names: one of DeepSpeed's, or a class of torch.optim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from megazero.config.deepspeed.extras import Named
from megazero.config.deepspeed.section import AUTO
from megazero.deepspeed.optimizers.adam import FusedAdam
from megazero.deepspeed.optimizers.fused import (
    COMPRESSED,
    CompressedOptimizer,
    FusedLamb,
    FusedLion,
    Kind,
    Options,
    ParamGroups,
)
from megazero.deepspeed.optimizers.muon import MUON_OPTIMIZER, MuonWithAuxAdam, split_by_mark
from megazero.deepspeed.schedules.choose import fit
from megazero.errors import ConfigError

LAMB_OPTIMIZER = "lamb"
"""The name of LAMB in a JSON."""
_OWN: Mapping[str, type[torch.optim.Optimizer]] = MappingProxyType(
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
_ONE_BIT: Mapping[str, Kind] = MappingProxyType(
    {"onebitadam": "onebit-adam", "zerooneadam": "zero-one-adam", "onebitlamb": "onebit-lamb"}
)
_MUON_OWN = ("momentum", "nesterov", "weight_decay")
_MUON_REST = ("betas", "eps", "weight_decay")
_ELSEWHERE = frozenset({"max_grad_norm", "fp32_optimizer_states", "cuda_aware", "comm_backend_name"})
"""Arguments that have no effect: the engine clips and communicates, and moments are fp32."""
_VARIANTS_OFF: Mapping[str, bool] = MappingProxyType({"eps_inside_sqrt": False, "amsgrad": False})


def of_json(named: Named, params: ParamGroups) -> torch.optim.Optimizer:
    """Build the optimizer that a JSON names over parameters or parameter groups.

    Raises:
        ConfigError: the optimizer is unknown, an argument is unknown, or the learning rate is "auto".
    """
    options = {key: value for key, value in named.params.items() if key not in _ELSEWHERE}
    if options.get("lr") == AUTO:
        raise ConfigError(
            '`optimizer.params.lr` must be a number where a script builds the model, but is "auto"; '
            "write it down"
        )
    name = named.type.lower()
    if name == MUON_OPTIMIZER:
        return _muon(options, params)
    if name in _ONE_BIT:
        return _one_bit(named.type, _ONE_BIT[name], options, params)
    kind = _class_of(named.type, options)
    fit(kind, options, "optimizer", named.type)
    return kind(params, **options)


def _class_of(name: str, options: dict[str, object]) -> type[torch.optim.Optimizer]:
    """The class of a name; removes the options that only choose between classes."""
    own = name.lower()
    if own in ("adam", "adamw"):
        decoupled = bool(options.pop("adam_w_mode", True)) or own == "adamw"
        if options.pop("torch_adam", False):
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        options["adam_w_mode"] = decoupled
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


def _one_bit(name: str, kind: Kind, options: Options, params: ParamGroups) -> CompressedOptimizer:
    options = {key: value for key, value in options.items() if (key, value) not in _VARIANTS_OFF.items()}
    unknown = [key for key in options if key != "lr" and key not in COMPRESSED[kind]]
    if unknown:
        raise ConfigError(
            f"`optimizer.params` of {name} must be among lr, {', '.join(COMPRESSED[kind])}, but has "
            f"{', '.join(unknown)}; leave these out"
        )
    return CompressedOptimizer(kind, params, **options)


def _muon(options: Options, params: ParamGroups) -> MuonWithAuxAdam:
    known = {"lr", "muon_lr", "adam_lr", "ns_method", *_MUON_OWN, *_MUON_REST}
    off = {"adam_w_mode": True, "per_head_muon": False}
    unknown = [key for key, value in options.items() if key not in known and (key, value) not in off.items()]
    if unknown:
        raise ConfigError(
            f"`optimizer.params` of Muon must be among {', '.join(sorted(known))}, but has "
            f"{', '.join(unknown)}; leave these out"
        )
    moments = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def part(rate: str, defaults: Options, keys: Sequence[str]) -> Options:
        """The options of the Muon or the AdamW part; `rate` is its own learning rate, before `lr`."""
        rates = [options[key] for key in (rate, "lr") if key in options]
        own = {key: options[key] for key in keys if key in options}
        return {**defaults, **own, **({"lr": rates[0]} if rates else {})}

    muon = part("muon_lr", {"weight_decay": 0.0}, _MUON_OWN)
    return split_by_mark(params, muon, part("adam_lr", moments, _MUON_REST))
