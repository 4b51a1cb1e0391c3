"""Rules about preferences."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, rule

_FINETUNE, _MODEL, _PREFERENCE = paths.finetune, paths.model, paths.preference


@rule(
    (
        _FINETUNE.task,
        _PREFERENCE.preference_loss,
        _MODEL.moe_input_jitter_eps,
        _MODEL.moe_router_sampling,
    ),
    "leave the noise out, or take `--preference-loss simpo` or orpo",
)
def preferences_route_as_the_reference(case: Case) -> bool:
    """routers must be without noise for a preference loss with a reference, which is scored without"""
    config, model = case.config, case.model
    if config.finetune.task != "preference" or not config.preference.has_reference or not model.num_experts:
        return True
    return model.moe_input_jitter_eps == 0 and model.moe_router_sampling == "none"
