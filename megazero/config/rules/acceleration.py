"""Rules of compilation: what changes from step to step cannot be compiled once."""

from __future__ import annotations

from megazero.config.rules.rule import Case, Rule

_COMPILE = "acceleration.compile"
_SKIPS = ("skipping.random_ltd", "skipping.progressive_layer_drop")


def _skips(case: Case) -> bool:
    return case.config.skipping.random_ltd or case.config.skipping.progressive_layer_drop


def _off(case: Case) -> bool:
    return not case.config.acceleration.compile


ACCELERATION_RULES: tuple[Rule, ...] = (
    Rule(
        "compile_backend_needs_compile",
        ("acceleration.compile_backend", _COMPILE),
        "`compile_backend` must be left at inductor unless `compile` is on",
        "add `--compile` or leave it out",
        lambda c: not _off(c) or c.config.acceleration.compile_backend == "inductor",
    ),
    Rule(
        "compile_needs_dense_layers",
        (_COMPILE, "model.num_experts"),
        "`compile` must be off for a model with experts",
        "leave `--compile` out: routers decide anew in each step how many rows an expert gets",
        lambda c: _off(c) or not c.config.model.num_experts,
    ),
    Rule(
        "compile_needs_one_length",
        (_COMPILE, "curriculum.seqlen_schedule"),
        "`compile` must be off with sequences that grow",
        "leave one of them out: layers would be compiled anew for each length",
        lambda c: _off(c) or c.config.curriculum.seqlen_schedule == "none",
    ),
    Rule(
        "compile_needs_whole_layers",
        (_COMPILE, *_SKIPS),
        "`compile` must be off where steps leave out tokens or layers",
        "leave one of them out: what a layer computes would change from step to step",
        lambda c: _off(c) or not _skips(c),
    ),
    Rule(
        "compile_needs_whole_backward",
        (_COMPILE, "parallel.pipeline_schedule"),
        "`compile` must be off with the schedules zb-h1 and zb-v",
        "choose `--pipeline-schedule 1f1b`: what is compiled computes both halves of backward at once",
        lambda c: _off(c) or c.config.parallel.pipeline_schedule not in ("zb-h1", "zb-v"),
    ),
    Rule(
        "compile_or_look_for_waits",
        (_COMPILE, "guards.check_host_waits", "parallel.device"),
        "`check_host_waits` must be off with `compile` unless `device` is cuda",
        "leave one of them out: on a CPU waits are found by looking at each operator",
        lambda c: _off(c) or c.config.guards.check_host_waits == "off" or c.config.parallel.device == "cuda",
    ),
)
