"""Rules of the optimizers, among them those that sum over the replicas themselves, a bit per element."""

from __future__ import annotations

from megazero.config.rules.rule import Case, Rule, value_at

_COMPRESSED = ("onebit-adam", "zero-one-adam", "onebit-lamb")
_TYPES = ("zero.main_params_dtype", "zero.grad_accumulation_dtype")


def _compressed(case: Case) -> bool:
    return case.config.optimizer.optimizer in _COMPRESSED


OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        "lamb_bounds_ordered",
        ("optimizer.lamb_min_coeff", "optimizer.lamb_max_coeff"),
        "`lamb_min_coeff` must be at most `lamb_max_coeff`",
        "lower `--lamb-min-coeff`",
        lambda c: c.config.optimizer.lamb_min_coeff <= c.config.optimizer.lamb_max_coeff,
    ),
    Rule(
        "muon_quintic_in_fives",
        ("optimizer.muon_coefficient_type", "optimizer.muon_num_ns_steps"),
        "`muon_num_ns_steps` must be a multiple of 5 unless `muon_coefficient_type` is simple",
        "set `--muon-num-ns-steps 5` or `--muon-coefficient-type simple`",
        lambda c: (
            c.config.optimizer.muon_coefficient_type == "simple"
            or c.config.optimizer.muon_num_ns_steps % 5 == 0
        ),
    ),
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
    Rule(
        "onebit_lamb_factors_ordered",
        ("optimizer.onebit_lamb_factor_min", "optimizer.onebit_lamb_factor_max"),
        "`onebit_lamb_factor_min` must be at most `onebit_lamb_factor_max`",
        "lower `--onebit-lamb-factor-min`",
        lambda c: c.config.optimizer.onebit_lamb_factor_min <= c.config.optimizer.onebit_lamb_factor_max,
    ),
)
