"""`optimizer`, and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated

from megazero.config.deepspeed.section import (
    NOTHING,
    PAIR,
    Amount,
    Bool,
    Convert,
    Count,
    Declared,
    JsonSection,
    Number,
    Only,
    Text,
    Values,
    ignored,
    left_to_flags,
    only,
    refused,
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


# Key that not every optimizer has -> the optimizers that have it, and the value that the others accept.
_OWNERS: Mapping[str, tuple[tuple[str, ...], bool | None]] = MappingProxyType(
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
    """Yield the faults that the optimizer's keys have only together, as sentences."""
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
    """Return the value of `--optimizer` for the optimizer that a JSON names; None if there is none."""
    return _OPTIMIZERS.get(values.get("optimizer.type", "").lower())


def is_lamb(values: Values) -> bool:
    """Whether a JSON's optimizer is LAMB, or 1-bit LAMB, which begins as LAMB."""
    return optimizer_of(values) in ("lamb", "onebit-lamb")


def uncorrected(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the key that asks for uncorrected moments of 1-bit or 0/1 Adam, and why it has no effect."""
    key = "optimizer.params.bias_correction"
    if optimizer_of(values) in ("onebit-adam", "zero-one-adam") and values.get(key) is False:
        yield key, "the moments of 1-bit and 0/1 Adam are always corrected"


def _of_lamb(read: Callable[[bool], object]) -> Convert:
    """Make a converter of a key of LAMB; with another optimizer, it sets nothing."""
    return lambda value, values: read(value) if is_lamb(values) else NOTHING


def _betas(pair: tuple[float, float] | None, values: Values) -> object:
    """Return the betas of Adam and of Lion; Lion's default is (0.9, 0.999), as in DeepSpeed."""
    if optimizer_of(values) == "lion":
        return (NOTHING, NOTHING, *(pair or (0.9, 0.999)))
    return NOTHING if pair is None else (*pair, NOTHING, NOTHING)


def _eps(value: float, values: Values) -> tuple[object, ...]:
    chosen = optimizer_of(values)
    own = [value if chosen == name else NOTHING for name in ("adagrad", "adadelta")]
    return (value if own == [NOTHING, NOTHING] else NOTHING, *own)


def _momentum(value: float | None, values: Values) -> tuple[object, ...]:
    """Return the momentum of SGD, by default 0, and of Muon, by default 0.95."""
    if optimizer_of(values) == "muon":
        return (NOTHING, 0.95 if value is None else value)
    return (value or 0.0, NOTHING)


def _nesterov(value: bool | None, values: Values) -> object:
    """Return Muon's Nesterov switch, by default on, with the other settings of DeepSpeed's Muon."""
    if optimizer_of(values) != "muon":
        return NOTHING
    return (value is not False, "simple", "shape_scaling")


def _rate(value: float, values: Values) -> object:
    """Return `lr` or, with Muon, `muon_lr`; `lr` is then the rate of the other weights."""
    own = values.get("optimizer.params.muon_lr")
    return own if optimizer_of(values) == "muon" and isinstance(own, float | int) else value


def _rates(value: float, values: Values) -> tuple[object, ...]:
    rest = values.get("optimizer.params.lr")
    return (value, rest if isinstance(rest, float | int) else NOTHING)


_BITS = "bits travel over the groups that everything else does"
_NO_VARIANT = "there is no such variant; leave it out"
_FASTEST = "the fastest update that is built is used, and all of them compute the same"


def _above_0(
    field: str, remedy: str = "the trust ratio would become 0 or stay as it is; leave it out"
) -> Declared:
    return sets(f"optimizer.{field}", only=Only("above 0", lambda factor: factor > 0), refused=remedy)


class NamedOptimizer(JsonSection):
    """`optimizer`."""

    at, heading = "optimizer", "Optimizer"

    type: Text = sets(
        "optimizer.optimizer",
        convert=lambda name, values: _OPTIMIZERS[name.lower()],
        only=only(*_TYPES),
        refused="choose Adam, AdamW (both decay weights separately from the gradient), SGD, Lamb, Lion, "
        "Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, or Adagrad, Adadelta, Adamax, NAdam, RAdam or RMSprop of "
        "torch.optim",
    )
    legacy_fusion: Bool = ignored(
        _FASTEST, False, getter="optimizer_legacy_fusion", attribute="optimizer_legacy_fusion"
    )


class OptimizerParams(JsonSection):
    """`optimizer.params`: what a training script does with the arguments of the optimizer's class."""

    at, heading, when = "optimizer.params", "Optimizer", "optimizer.type"

    lr: Amount = sets("optimizer.lr", convert=_rate, auto=left_to_flags)
    betas: Annotated[Declared, PAIR] = sets(
        *(f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2")),
        convert=_betas,
        absent=None,
        auto=left_to_flags,
    )
    eps: Amount = sets(
        *(f"optimizer.{name}" for name in ("adam_eps", "adagrad_eps", "adadelta_eps")),
        convert=_eps,
        auto=left_to_flags,
    )
    weight_decay: Amount = sets("optimizer.weight_decay", absent=0.0, auto=left_to_flags)
    momentum: Amount = sets(
        "optimizer.sgd_momentum",
        "optimizer.muon_momentum",
        convert=_momentum,
        absent=None,
        auto=left_to_flags,
    )
    rho: Amount = sets("optimizer.adadelta_rho")
    alpha: Amount = sets("optimizer.rmsprop_alpha")
    muon_lr: Amount = sets("optimizer.lr", "optimizer.muon_scalar_lr", convert=_rates)
    adam_lr: Amount = sets("optimizer.muon_scalar_lr")
    nesterov: Bool = sets(
        *(f"optimizer.muon_{name}" for name in ("nesterov", "coefficient_type", "scale_mode")),
        convert=_nesterov,
        absent=None,
    )
    ns_method: Text = ignored(
        "DeepSpeed's methods are two ways to the same polynomial, and `--muon-ns-dtype` says how exact it is",
        when="",
    )
    muon_num_heads: Count = refused(
        "queries, keys and values are one matrix each, over all heads; leave it out", when=""
    )
    max_coeff: Amount = _above_0("lamb_max_coeff", "a trust ratio of 0 moves nothing; choose 10")
    min_coeff: Amount = sets("optimizer.lamb_min_coeff")
    # DeepSpeed's FusedLamb corrects the learning rate, after the trust ratio.
    bias_correction: Bool = sets(
        "optimizer.lamb_bias_correction", convert=_of_lamb(lambda on: "rate" if on else "none"), absent=True
    )
    # apex has a name for it; DeepSpeed's LAMB always does it.
    use_nvlamb: Bool = sets("optimizer.lamb_adapt_all", convert=_of_lamb(lambda on: on), absent=True)
    freeze_step: Count = sets("optimizer.onebit_freeze_step")
    coeff_beta: Amount = sets(
        "optimizer.onebit_lamb_coeff_beta",
        only=Only("at most 1", lambda decay: decay <= 1),
        refused="it is the decay of an average; choose 0.9",
    )
    factor_max: Amount = _above_0("onebit_lamb_factor_max")
    factor_min: Amount = _above_0("onebit_lamb_factor_min")
    factor_threshold: Amount = _above_0("onebit_lamb_factor_threshold")
    var_freeze_step: Count = sets("optimizer.zero_one_var_freeze_step")
    var_update_scaler: Count = sets("optimizer.zero_one_var_update_scaler")
    local_step_scaler: Count = sets("optimizer.zero_one_local_step_scaler")
    local_step_clipper: Count = sets("optimizer.zero_one_local_step_clipper")
    cuda_aware: Bool = ignored(_BITS, when="")
    comm_backend_name: Text = ignored(_BITS, when="")
    max_grad_norm: Amount = sets("optimizer.clip_grad")
    adam_w_mode: Bool = refused(
        "the update always decays weights separately from the gradient; leave it out", only(True), when=""
    )
    grad_averaging: Bool = refused(
        "gradients always enter the first moment by 1 - beta1; leave it out", only(True), when=""
    )
    eps_inside_sqrt: Bool = refused("epsilon is always added to the root; leave it out", only(False), when="")
    amsgrad: Bool = refused(_NO_VARIANT, only(False), when="")
    maximize: Bool = refused(_NO_VARIANT, only(False), when="")
    centered: Bool = refused(_NO_VARIANT, only(False), when="")
    decoupled_weight_decay: Bool = refused(_NO_VARIANT, only(False), when="")
    dampening: Number = refused(_NO_VARIANT, only(0), when="")
    lr_decay: Number = refused(_NO_VARIANT, only(0), when="")
    initial_accumulator_value: Number = refused(_NO_VARIANT, only(0), when="")
    momentum_decay: Number = refused(
        "momenta always grow at torch's default rate; leave it out", only(0.004), when=""
    )
    torch_adam: Bool = ignored(_FASTEST, when="")
    fused: Bool = ignored(_FASTEST, when="")
    foreach: Bool = ignored(_FASTEST, when="")
    capturable: Bool = ignored(_FASTEST, when="")
    differentiable: Bool = ignored(_FASTEST, when="")
    set_grad_none: Bool = ignored(_FASTEST, when="")


class Clipping(JsonSection):
    """The largest norm of the gradients."""

    heading = "Optimizer"

    gradient_clipping: Amount = sets("optimizer.clip_grad", auto=left_to_flags)
