"""The rows of the keys of a DeepSpeed JSON's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.row import (
    AMOUNT,
    BOOL,
    COUNT,
    NOTHING,
    NUMBER,
    PAIR,
    TEXT,
    KeyRow,
    Only,
    Values,
    ignores,
    left_to_flags,
    only,
    refuses,
    say,
    sets,
)

# The types that a JSON may name, in any case, and the value of `--optimizer` that each stands for.
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "Adam": "adam",
        "AdamW": "adam",
        "SGD": "sgd",
        "Lamb": "lamb",
        "FusedLamb": "lamb",
        "Lion": "lion",
        "FusedLion": "lion",
        "Muon": "muon",
        **{name: name.lower() for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")},
        "OneBitAdam": "onebit-adam",
        "ZeroOneAdam": "zero-one-adam",
        "OneBitLamb": "onebit-lamb",
    }
)
_OPTIMIZERS: Mapping[str, str] = MappingProxyType({name.lower(): flag for name, flag in _TYPES.items()})


def _optimizer(key: str, shape: Any, *fields: str, **rest: Any) -> KeyRow:
    return sets(f"optimizer.params.{key}", shape, *fields, when="optimizer.type", **rest)


# Keys that not every optimizer has: those that have it, and what others accept, which is what they do.
_OWNERS: Mapping[str, tuple[tuple[str, ...], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("max_coeff", "min_coeff", "use_nvlamb"), (("lamb", "onebit-lamb"), None)),
        "bias_correction": (("lamb", "onebit-lamb", "onebit-adam", "zero-one-adam"), True),
        **dict.fromkeys(("muon_lr", "adam_lr", "ns_method"), (("muon",), None)),
        "nesterov": (("muon",), False),
        "rho": (("adadelta",), None),
        "alpha": (("rmsprop",), None),
        "freeze_step": (("onebit-adam", "onebit-lamb"), None),
        **dict.fromkeys(
            ("coeff_beta", "factor_max", "factor_min", "factor_threshold"), (("onebit-lamb",), None)
        ),
        **dict.fromkeys(
            ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
            (("zero-one-adam",), None),
        ),
    }
)


def optimizer_faults(values: Values) -> Iterator[str]:
    """The faults of the optimizer's keys together, each sound by itself, as sentences."""
    given, chosen = values.get("optimizer.type"), optimizer_of(values)
    for name, (owners, harmless) in _OWNERS.items() if chosen is not None else ():
        key = f"optimizer.params.{name}"
        if chosen not in owners and values.get(key, harmless) != harmless:
            yield f"`{key}` must not be {say(values[key])} with {given}; leave it out."
    if chosen == "rmsprop" and values.get("optimizer.params.momentum"):
        yield "`optimizer.params.momentum` must be 0 with RMSprop, which has no momentum here; leave it out."
    for low, high, usual in (
        ("min_coeff", "max_coeff", (0.01, 10.0)),
        ("factor_min", "factor_max", (0.5, 4.0)),
    ):
        least, most = (
            values.get(f"optimizer.params.{name}", default)
            for name, default in zip((low, high), usual, strict=True)
        )
        if least > most:
            yield f"`optimizer.params.{low}` must be at most `optimizer.params.{high}`; lower it."


def optimizer_of(values: Values) -> str | None:
    """The optimizer that a JSON names, as `--optimizer` does; None if that has no such value."""
    return _OPTIMIZERS.get(values.get("optimizer.type", "").lower())


def is_lamb(values: Values) -> bool:
    """Whether a JSON's optimizer is LAMB, or 1-bit LAMB, which begins as LAMB."""
    return optimizer_of(values) in ("lamb", "onebit-lamb")


def uncorrected(values: Values) -> Iterator[tuple[str, str]]:
    """The key that asks a script of ours for moments as they are, where DeepSpeed's never are otherwise."""
    key = "optimizer.params.bias_correction"
    if optimizer_of(values) in ("onebit-adam", "zero-one-adam") and values.get(key) is False:
        yield key, "the moments of 1-bit and 0/1 Adam are always corrected"


def _of_lamb(read: Callable[[Any], Any]) -> Callable[[Any, Values], Any]:
    """Make a converter of a key of LAMB; with another optimizer, it sets nothing."""
    return lambda value, values: read(value) if is_lamb(values) else NOTHING


def _betas(pair: tuple[float, float] | None, values: Values) -> Any:
    """The betas of the optimizer; left out, Lion's are (0.9, 0.999), as in DeepSpeed."""
    if optimizer_of(values) == "lion":
        return (NOTHING, NOTHING, *(pair or (0.9, 0.999)))
    return NOTHING if pair is None else (*pair, NOTHING, NOTHING)


def _eps(value: float, values: Values) -> tuple[Any, ...]:
    chosen = optimizer_of(values)
    own = [value if chosen == name else NOTHING for name in ("adagrad", "adadelta")]
    return (value if own == [NOTHING, NOTHING] else NOTHING, *own)


def _momentum(value: float | None, values: Values) -> tuple[Any, ...]:
    """The momentum of SGD, 0 if it is left out, or of Muon, 0.95 if it is left out."""
    if optimizer_of(values) == "muon":
        return (NOTHING, 0.95 if value is None else value)
    return (value or 0.0, NOTHING)


def _nesterov(value: bool | None, values: Values) -> Any:
    """The Nesterov setting of Muon, on if left out, with the other settings of DeepSpeed's Muon."""
    if optimizer_of(values) != "muon":
        return NOTHING
    return (value is not False, "simple", "shape_scaling")


def _rate(value: float, values: Values) -> Any:
    """The learning rate `lr` or, for Muon, its own one; `lr` is then that of the other weights."""
    own = values.get("optimizer.params.muon_lr")
    return own if optimizer_of(values) == "muon" and isinstance(own, float | int) else value


def _rates(value: float, values: Values) -> tuple[Any, ...]:
    rest = values.get("optimizer.params.lr")
    return (value, rest if isinstance(rest, float | int) else NOTHING)


def _corrects(on: bool) -> str:
    # DeepSpeed's FusedLamb multiplies the learning rate, after the trust ratio.
    return "rate" if on else "none"


_ABOVE_0: Mapping[str, Any] = MappingProxyType(
    {
        "only": Only("above 0", lambda factor: factor > 0),
        "refused": "the trust ratio would become 0 or stay as it is; leave it out",
    }
)

OPTIMIZER_ROWS: tuple[KeyRow, ...] = (
    sets(
        "optimizer.type",
        TEXT,
        "optimizer.optimizer",
        convert=lambda name, values: _OPTIMIZERS[name.lower()],
        only=only(*_TYPES),
        refused="choose Adam, AdamW (both decay weights separately from the gradient), SGD, Lamb, Lion, "
        "Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, or Adagrad, Adadelta, Adamax, NAdam, RAdam or RMSprop of "
        "torch.optim",
    ),
    _optimizer("lr", AMOUNT, "optimizer.lr", convert=_rate, auto=left_to_flags),
    _optimizer(
        "betas",
        PAIR,
        *(f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2")),
        convert=_betas,
        absent=None,
        auto=left_to_flags,
    ),
    _optimizer(
        "eps",
        AMOUNT,
        *(f"optimizer.{name}" for name in ("adam_eps", "adagrad_eps", "adadelta_eps")),
        convert=_eps,
        auto=left_to_flags,
    ),
    _optimizer("weight_decay", AMOUNT, "optimizer.weight_decay", absent=0.0, auto=left_to_flags),
    _optimizer(
        "momentum",
        AMOUNT,
        "optimizer.sgd_momentum",
        "optimizer.muon_momentum",
        convert=_momentum,
        absent=None,
        auto=left_to_flags,
    ),
    _optimizer("rho", AMOUNT, "optimizer.adadelta_rho"),
    _optimizer("alpha", AMOUNT, "optimizer.rmsprop_alpha"),
    _optimizer("muon_lr", AMOUNT, "optimizer.lr", "optimizer.muon_scalar_lr", convert=_rates),
    _optimizer("adam_lr", AMOUNT, "optimizer.muon_scalar_lr"),
    _optimizer(
        "nesterov",
        BOOL,
        *(f"optimizer.muon_{name}" for name in ("nesterov", "coefficient_type", "scale_mode")),
        convert=_nesterov,
        absent=None,
    ),
    *ignores(
        "DeepSpeed's methods are two ways to the same polynomial, and `--muon-ns-dtype` says how exact it is",
        TEXT,
        "optimizer.params.ns_method",
    ),
    *refuses(
        "queries, keys and values are one matrix each, over all heads; leave it out",
        COUNT,
        None,
        "optimizer.params.muon_num_heads",
    ),
    _optimizer(
        "max_coeff",
        AMOUNT,
        "optimizer.lamb_max_coeff",
        only=Only("above 0", lambda bound: bound > 0),
        refused="a trust ratio of 0 moves nothing; choose 10",
    ),
    _optimizer("min_coeff", AMOUNT, "optimizer.lamb_min_coeff"),
    _optimizer(
        "bias_correction",
        BOOL,
        "optimizer.lamb_bias_correction",
        convert=_of_lamb(_corrects),
        absent=True,
    ),
    # apex's name for what DeepSpeed's LAMB always does.
    _optimizer("use_nvlamb", BOOL, "optimizer.lamb_adapt_all", convert=_of_lamb(lambda on: on), absent=True),
    _optimizer("freeze_step", COUNT, "optimizer.onebit_freeze_step"),
    _optimizer(
        "coeff_beta",
        AMOUNT,
        "optimizer.onebit_lamb_coeff_beta",
        only=Only("at most 1", lambda decay: decay <= 1),
        refused="it is the decay of an average; choose 0.9",
    ),
    _optimizer("factor_max", AMOUNT, "optimizer.onebit_lamb_factor_max", **_ABOVE_0),
    _optimizer("factor_min", AMOUNT, "optimizer.onebit_lamb_factor_min", **_ABOVE_0),
    _optimizer("factor_threshold", AMOUNT, "optimizer.onebit_lamb_factor_threshold", **_ABOVE_0),
    _optimizer("var_freeze_step", COUNT, "optimizer.zero_one_var_freeze_step"),
    _optimizer("var_update_scaler", COUNT, "optimizer.zero_one_var_update_scaler"),
    _optimizer("local_step_scaler", COUNT, "optimizer.zero_one_local_step_scaler"),
    _optimizer("local_step_clipper", COUNT, "optimizer.zero_one_local_step_clipper"),
    *ignores("bits travel over the groups that everything else does", BOOL, "optimizer.params.cuda_aware"),
    *ignores(
        "bits travel over the groups that everything else does", TEXT, "optimizer.params.comm_backend_name"
    ),
    sets("optimizer.params.max_grad_norm", AMOUNT, "optimizer.clip_grad", when="optimizer.type"),
    *refuses(
        "the update always decays weights separately from the gradient; leave it out",
        BOOL,
        only(True),
        "optimizer.params.adam_w_mode",
    ),
    *refuses(
        "gradients always enter the first moment by 1 - beta1; leave it out",
        BOOL,
        only(True),
        "optimizer.params.grad_averaging",
    ),
    *refuses(
        "epsilon is always added to the root; leave it out",
        BOOL,
        only(False),
        "optimizer.params.eps_inside_sqrt",
    ),
    *refuses(
        "there is no such variant; leave it out",
        BOOL,
        only(False),
        "optimizer.params.amsgrad",
        "optimizer.params.maximize",
    ),
    *refuses(
        "there is no such variant; leave it out",
        BOOL,
        only(False),
        "optimizer.params.centered",
        "optimizer.params.decoupled_weight_decay",
    ),
    *refuses(
        "there is no such variant; leave it out",
        NUMBER,
        only(0),
        "optimizer.params.dampening",
        "optimizer.params.lr_decay",
        "optimizer.params.initial_accumulator_value",
    ),
    *refuses(
        "momenta always grow at torch's default rate; leave it out",
        NUMBER,
        only(0.004),
        "optimizer.params.momentum_decay",
    ),
    *ignores(
        "the fastest update that is built is used, and all of them compute the same",
        BOOL,
        "optimizer.params.torch_adam",
        "optimizer.params.fused",
        "optimizer.params.foreach",
        "optimizer.params.capturable",
        "optimizer.params.differentiable",
        "optimizer.params.set_grad_none",
        "optimizer.legacy_fusion",
    ),
    sets("gradient_clipping", AMOUNT, "optimizer.clip_grad", auto=left_to_flags),
)
