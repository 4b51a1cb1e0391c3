"""Rules about the optimizers' own settings."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Rule

_OPTIMIZER = paths.optimizer

OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        "lamb_bounds_ordered",
        (_OPTIMIZER.lamb_min_coeff, _OPTIMIZER.lamb_max_coeff),
        "`lamb_min_coeff` must be at most `lamb_max_coeff`",
        "lower `--lamb-min-coeff`",
        lambda c: c.config.optimizer.lamb_min_coeff <= c.config.optimizer.lamb_max_coeff,
    ),
    Rule(
        "muon_quintic_in_fives",
        (_OPTIMIZER.muon_coefficient_type, _OPTIMIZER.muon_num_ns_steps),
        "`muon_num_ns_steps` must be a multiple of 5 unless `muon_coefficient_type` is simple",
        "set `--muon-num-ns-steps 5` or `--muon-coefficient-type simple`",
        lambda c: (
            c.config.optimizer.muon_coefficient_type == "simple"
            or c.config.optimizer.muon_num_ns_steps % 5 == 0
        ),
    ),
    Rule(
        "onebit_lamb_factors_ordered",
        (_OPTIMIZER.onebit_lamb_factor_min, _OPTIMIZER.onebit_lamb_factor_max),
        "`onebit_lamb_factor_min` must be at most `onebit_lamb_factor_max`",
        "lower `--onebit-lamb-factor-min`",
        lambda c: c.config.optimizer.onebit_lamb_factor_min <= c.config.optimizer.onebit_lamb_factor_max,
    ),
)
