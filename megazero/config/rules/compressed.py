"""Rules about optimizers that sum over the replicas themselves, a bit per element."""

from __future__ import annotations

from megazero.config.fields import FIELD_BY_PATH
from megazero.config.rules.rule import Case, Rule, value_at

_COMPRESSED = ("onebit-adam", "zero-one-adam", "onebit-lamb")
_ONEBIT = ("optimizer.onebit_freeze_step",)
_SCALE = ("optimizer.onebit_precondition",)
_LAMB = tuple(
    f"optimizer.onebit_lamb_{name}" for name in ("coeff_beta", "factor_max", "factor_min", "factor_threshold")
)
_ZERO_ONE = tuple(
    f"optimizer.zero_one_{name}"
    for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
)
_TYPES = ("zero.main_params_dtype", "zero.grad_accumulation_dtype")


def _compressed(case: Case) -> bool:
    return case.config.optimizer.optimizer in _COMPRESSED


def _settings_of(name: str, whose: str, paths: tuple[str, ...], *optimizers: str) -> Rule:
    """Settings that only these optimizers have."""
    return Rule(
        name,
        ("optimizer.optimizer", *paths),
        f"{whose} settings must be left at their defaults unless `optimizer` is {' or '.join(optimizers)}",
        f"add `--optimizer {optimizers[0]}` or leave them out",
        lambda c: (
            c.config.optimizer.optimizer in optimizers
            or all(value_at(c.config, path) == FIELD_BY_PATH[path].default for path in paths)
        ),
    )


COMPRESSED_RULES: tuple[Rule, ...] = (
    Rule(
        "compressed_optimizer_needs_stage_0",
        ("optimizer.optimizer", "zero.stage"),
        f"`stage` of ZeRO must be 0 with the optimizers {', '.join(_COMPRESSED)}: each replica needs whole "
        "moments to say what its bits leave out of the sum, and a sharded one could not use the sum",
        "add `--zero-stage 0` or choose `--optimizer adam` or `lamb`",
        lambda c: not _compressed(c) or c.config.zero.stage == 0,
    ),
    Rule(
        "compressed_optimizer_needs_fp32_state",
        ("optimizer.optimizer", *_TYPES),
        "`main_params_dtype` and `grad_accumulation_dtype` must be fp32 with the optimizers "
        f"{', '.join(_COMPRESSED)}, which feed back what rounding to a bit leaves out",
        "leave them out",
        lambda c: not _compressed(c) or all(value_at(c.config, path) == "fp32" for path in _TYPES),
    ),
    Rule(
        "compressed_state_stays_on_device",
        ("optimizer.optimizer", "offload.optimizer"),
        f"`optimizer` of `offload` must be none with the optimizers {', '.join(_COMPRESSED)}, whose messages "
        "are made of moments and leave from the device",
        "leave `--offload-optimizer` out",
        lambda c: not _compressed(c) or c.config.offload.optimizer == "none",
    ),
    _settings_of("onebit_settings_need_onebit", "1-bit optimizers'", _ONEBIT, "onebit-adam", "onebit-lamb"),
    _settings_of(
        "precondition_needs_compressed_adam", "1-bit and 0/1 Adam's", _SCALE, "onebit-adam", "zero-one-adam"
    ),
    _settings_of("onebit_lamb_settings_need_onebit_lamb", "1-bit LAMB's", _LAMB, "onebit-lamb"),
    _settings_of("zero_one_settings_need_zero_one_adam", "0/1 Adam's", _ZERO_ONE, "zero-one-adam"),
    Rule(
        "onebit_lamb_factors_ordered",
        ("optimizer.onebit_lamb_factor_min", "optimizer.onebit_lamb_factor_max"),
        "`onebit_lamb_factor_min` must be at most `onebit_lamb_factor_max`",
        "lower `--onebit-lamb-factor-min`",
        lambda c: c.config.optimizer.onebit_lamb_factor_min <= c.config.optimizer.onebit_lamb_factor_max,
    ),
)
