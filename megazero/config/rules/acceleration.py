"""Rules of compilation: what changes from step to step cannot be compiled once."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import FIELD_BY_PATH
from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.tree import Config

_COMPILE = "acceleration.compile"
_SKIPS = ("skipping.random_ltd", "skipping.progressive_layer_drop")


def _skips(case: Case) -> bool:
    return case.config.skipping.random_ltd or case.config.skipping.progressive_layer_drop


def _off(case: Case) -> bool:
    return not case.config.acceleration.compile


_FP8 = "precision.fp8_format"
_FP8_SETTINGS = ("precision.fp8_recipe", "precision.fp8_margin", "precision.first_last_layers_bf16")
_HISTORY = ("precision.fp8_amax_history_len", "precision.fp8_amax_compute_algo")
_ENDS = ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16")


def _wide(case: Case) -> bool:
    return case.config.precision.fp8_format == "none"


def _at_default(case: Case, paths: tuple[str, ...]) -> bool:
    return all(value_at(case.config, path) == FIELD_BY_PATH[path].default for path in paths)


FP8_RULES: tuple[Rule, ...] = (
    Rule(
        "fp8_settings_need_format",
        (_FP8, *_FP8_SETTINGS),
        "how 8-bit products are made must be left out unless `fp8_format` is e4m3 or hybrid",
        "add `--fp8-format hybrid` or leave them out",
        lambda c: not _wide(c) or _at_default(c, _FP8_SETTINGS),
    ),
    Rule(
        "fp8_history_needs_delayed",
        (_FP8, "precision.fp8_recipe", *_HISTORY),
        "the amax history must be left at its defaults unless `fp8_format` is set and `fp8_recipe` delayed",
        "add `--fp8-recipe delayed` or leave it out",
        lambda c: _at_default(c, _HISTORY) or (not _wide(c) and c.config.precision.fp8_recipe == "delayed"),
    ),
    Rule(
        "fp8_ends_need_first_last",
        ("precision.first_last_layers_bf16", *_ENDS),
        "the number of layers left out at both ends must be left at 1 unless `first_last_layers_bf16` is on",
        "add `--first-last-layers-bf16` or leave it out",
        lambda c: c.config.precision.first_last_layers_bf16 or _at_default(c, _ENDS),
    ),
    Rule(
        "fp8_needs_dense_layers",
        (_FP8, "model.num_experts"),
        "`fp8_format` must be none for a model with experts",
        "leave it out: the products of experts are not of 8-bit floats",
        lambda c: _wide(c) or not c.config.model.num_experts,
    ),
    Rule(
        "fp8_needs_whole_backward",
        (_FP8, "parallel.pipeline_schedule"),
        "`fp8_format` must be none with the schedules zb-h1 and zb-v",
        "choose `--pipeline-schedule 1f1b`: an 8-bit product computes both halves of backward at once",
        lambda c: _wide(c) or c.config.parallel.pipeline_schedule not in ("zb-h1", "zb-v"),
    ),
)

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

_GRAPH = "acceleration.cuda_graph"


def _without_graphs(case: Case) -> bool:
    return not case.config.acceleration.cuda_graph


def _graph_rule(
    name: str, fields: tuple[str, ...], message: str, remedy: str, holds: Callable[[Config], bool]
) -> Rule:
    return Rule(
        f"cuda_graph_{name}",
        (_GRAPH, *fields),
        f"`cuda_graph` must be off {message}",
        remedy,
        lambda c: _without_graphs(c) or holds(c.config),
    )


GRAPH_RULES: tuple[Rule, ...] = (
    _graph_rule(
        "needs_cuda",
        ("parallel.device",),
        "on a CPU",
        "leave it out, or train on CUDA",
        lambda config: config.parallel.device != "cpu",
    ),
    _graph_rule(
        "or_compile",
        (_COMPILE,),
        "with `compile`",
        "keep one: what is compiled is launched by code of its own",
        lambda config: not config.acceleration.compile,
    ),
    _graph_rule(
        "needs_dense_layers",
        ("model.num_experts",),
        "for a model with experts",
        "leave it out: how many rows an expert gets is read by the host",
        lambda config: not config.model.num_experts,
    ),
    _graph_rule(
        "needs_one_length",
        ("curriculum.seqlen_schedule",),
        "with sequences that grow",
        "leave one of them out: a graph has the shapes of its capture",
        lambda config: config.curriculum.seqlen_schedule == "none",
    ),
    _graph_rule(
        "needs_whole_layers",
        _SKIPS,
        "where steps leave out tokens or layers",
        "leave one of them out: a graph computes what its capture did",
        lambda config: not (config.skipping.random_ltd or config.skipping.progressive_layer_drop),
    ),
    _graph_rule(
        "needs_resting_weights",
        ("zero.stage",),
        "with ZeRO stage 3",
        "choose `--zero-stage 2`: a graph reads weights where they were when it was captured, and stage 3 "
        "gathers and frees them",
        lambda config: config.zero.stage < 3,
    ),
    _graph_rule(
        "needs_one_micro_batch_at_a_time",
        ("parallel.pipeline_model_parallel_size",),
        "with pipeline stages",
        "leave one of them out: several micro-batches are alive there, and a graph has memory for one",
        lambda config: config.parallel.pipeline_model_parallel_size == 1,
    ),
    _graph_rule(
        "needs_whole_weights",
        ("parallel.tensor_model_parallel_size",),
        "with tensor parallelism",
        "leave one of them out: layers then communicate, which is not captured",
        lambda config: config.parallel.tensor_model_parallel_size == 1,
    ),
    _graph_rule(
        "needs_kept_activations",
        ("recompute.granularity",),
        "where whole layers are recomputed",
        "choose `--recompute-granularity selective`: a graph keeps the memory of its layer anyway",
        lambda config: config.recompute.granularity != "full",
    ),
)
