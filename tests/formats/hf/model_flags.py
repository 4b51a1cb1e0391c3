"""The flags of a model: what a line says in full that a folder says by itself."""

from __future__ import annotations

from megazero.config.fields import FIELDS
from megazero.config.tree.model import ModelConfig


def model_flags(model: ModelConfig) -> list[str]:
    """The pretraining script's flags for a model: all settings that differ from their defaults.

    The activation's default depends on biases, so it is given where there are none. Defaults of experts
    depend on whether the line is Megatron-LM's or Megatron-DeepSpeed's, so a flag of Megatron-LM's is given
    beside `--expert-interval`.
    """
    named: set[str] = set() if model.add_bias_linear else {"activation"}
    named |= {"moe_router_topk"} if model.expert_interval is not None else set()
    lines = []
    for spec in (spec for spec in FIELDS if spec.section == "model"):
        value = getattr(model, spec.name)
        if value == spec.default and spec.name not in named:
            continue
        said = " ".join(map(str, value)) if isinstance(value, tuple) else value
        words = spec.flag if isinstance(value, bool) else f"{spec.flag} {said}"
        grouped = spec.name == "num_query_groups"
        lines.append(f"{words} --group-query-attention" if grouped else words)
    return lines
