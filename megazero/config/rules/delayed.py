"""Rules about updates that are delayed by a step, and what cannot be delayed."""

from __future__ import annotations

from typing import get_args

from megazero.config.offload import OffloadConfig
from megazero.config.optimization import OptimizerName
from megazero.config.rules.rule import Case, Rule

# These send messages between ranks during an update.
_SENDING = ("lamb", "muon", "onebit-adam", "zero-one-adam", "onebit-lamb")
_OPTIMIZERS = tuple(name for name in get_args(OptimizerName) if name not in _SENDING)


def _delays(case: Case) -> bool:
    return case.config.offload.delayed_param_update


def _on_host(offload: OffloadConfig) -> bool:
    gradients = offload.gradients in ("auto", "cpu")
    return offload.optimizer == "cpu" and gradients and offload.fraction == 1.0


DELAYED_RULES: tuple[Rule, ...] = (
    Rule(
        "delayed_start_needs_delayed_update",
        ("offload.delayed_param_update_start", "offload.delayed_param_update"),
        "`delayed_param_update_start` must be left at 40 unless `delayed_param_update` is set",
        "add `--delayed-param-update` or leave it out",
        lambda c: _delays(c) or c.config.offload.delayed_param_update_start == 40,
    ),
    Rule(
        "delayed_update_runs_on_the_host",
        (
            "offload.delayed_param_update",
            "offload.optimizer",
            "offload.gradients",
            "offload.fraction",
        ),
        "`delayed_param_update` must be off unless all masters, moments and gradient sums are in the host's "
        "memory: on the device an update would take turns with the step beside it, and from disk it would "
        "share buffers with it",
        "add `--offload-optimizer cpu`, and leave `--offload-gradients` and `--offload-fraction` out",
        lambda c: not _delays(c) or _on_host(c.config.offload),
    ),
    Rule(
        "delayed_update_needs_parameters_on_device",
        ("offload.delayed_param_update", "offload.parameters"),
        "`delayed_param_update` must be off with offloaded `parameters`: the slices that the step beside an "
        "update reads would be those that it is to replace",
        "leave `--offload-parameters` or `--delayed-param-update` out",
        lambda c: not _delays(c) or c.config.offload.parameters == "none",
    ),
    Rule(
        "delayed_update_is_elementwise",
        ("offload.delayed_param_update", "optimizer.optimizer"),
        f"`delayed_param_update` must be off unless `optimizer` is one of {', '.join(_OPTIMIZERS)}: others "
        "send messages between ranks during an update, which would cross those of the step beside it",
        "choose `--optimizer adam` or leave `--delayed-param-update` out",
        lambda c: not _delays(c) or c.config.optimizer.optimizer in _OPTIMIZERS,
    ),
    Rule(
        "delayed_update_needs_exact_weights",
        ("offload.delayed_param_update", "zero.quantized_weights"),
        "`delayed_param_update` must be off with `quantized_weights`: weights in use are saved, and codes of "
        "what has been rounded are not the same codes",
        "leave `--zero-quantized-weights` or `--delayed-param-update` out",
        lambda c: not _delays(c) or c.config.zero.quantized_weights == "none",
    ),
    Rule(
        "delayed_update_needs_pretraining",
        ("offload.delayed_param_update", "finetune.task"),
        "`delayed_param_update` must be off with a `task`, whose best weights are chosen by those in use and "
        "kept from masters that are one update ahead",
        "leave `--delayed-param-update` out",
        lambda c: not _delays(c) or c.config.finetune.task is None,
    ),
)
