"""Rules about the length of the training, its optimizer and schedules, precision and recompute."""

from __future__ import annotations

from megazero.config.derive import decoupled
from megazero.config.fields import paths
from megazero.config.numbers import LARGEST
from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.steps import UNITS
from megazero.config.training_plan import LR_LENGTHS, Evaluations, Limits, LrLengths
from megazero.config.tree.model import ModelConfig

_BATCH, _MODEL, _OPTIMIZER, _PRECISION, _RECOMPUTE, _TRAINING = (
    paths.batch,
    paths.model,
    paths.optimizer,
    paths.precision,
    paths.recompute,
    paths.training,
)

_LENGTHS = tuple(f"training.train_{unit}" for unit in UNITS)
_LR_DECAY = tuple(f"optimizer.lr_decay_{unit}" for unit in UNITS)
_LR_WARMUP = tuple(f"optimizer.lr_warmup_{unit}" for unit in UNITS)
_LR_WSD = tuple(f"optimizer.lr_wsd_decay_{unit}" for unit in UNITS)
_LR_LENGTHS = tuple(f"optimizer.{name}" for name in LR_LENGTHS)
_MODULES = (_RECOMPUTE.modules, _MODEL.num_experts, _MODEL.moe_shared_expert_intermediate_size)
_WEIGHT_DECAY_RANGE = (_OPTIMIZER.start_weight_decay, _OPTIMIZER.end_weight_decay)


def _given(case: Case, paths: tuple[str, ...]) -> list[str]:
    """The paths that have a value; 0, off and empty do not count as one."""
    return [path for path in paths if value_at(case.config, path)]


def _units(case: Case, paths: tuple[str, ...]) -> set[str]:
    return {path.rsplit("_", 1)[1] for path in _given(case, paths)}


def _lr_units_agree(case: Case) -> bool:
    warmup = _units(case, _LR_WARMUP)
    decay = _units(case, tuple(path for path in _LR_LENGTHS if path not in _LR_WARMUP))
    return len(warmup | decay) <= 1 or (len(warmup) == 1 and decay == {"tokens"})


def _weight_decay_grows(case: Case) -> bool:
    start, end = case.config.optimizer.start_weight_decay, case.config.optimizer.end_weight_decay
    return start is None or end is None or start <= end


def _absent_modules(model: ModelConfig) -> set[str]:
    """The parts that the model's layers do not have, of those that backward can compute again."""
    absent = set() if model.num_experts else {"moe", "moe_act", "shared_experts"}
    absent |= set() if model.multi_latent_attention else {"mla_up_proj"}
    absent |= set() if "*-" in (model.layer_parts or ("*-",)) else {"layernorm", "mlp", "moe"}
    absent |= set() if model.moe_shared_expert_intermediate_size else {"shared_experts"}
    return absent | ({"layernorm"} if model.norm_position == "output" else set())


def _lr(case: Case) -> LrLengths | None:
    """The schedule's lengths; None if another rule is broken, without which they mean nothing."""
    steps = case.steps
    if not _lr_units_agree(case) or not _given(case, _LENGTHS) or steps is None:
        return None
    optimizer, training = case.config.optimizer, case.config.training
    return LrLengths.of(optimizer, training, steps, Limits.of(training).end(steps))


def _warmup_shorter(case: Case) -> bool:
    lengths = _lr(case)
    return lengths is None or lengths.warmup == 0 or lengths.warmup < lengths.decay


def _wsd_fits(case: Case) -> bool:
    lengths = _lr(case)
    return lengths is None or lengths.wsd_decay is None or lengths.warmup + lengths.wsd_decay <= lengths.decay


def _lengths_clause(case: Case) -> str:
    lengths = _lr(case)
    if lengths is None:
        return "the lengths are unknown"
    last = f", final decay {lengths.wsd_decay}" if lengths.wsd_decay else ""
    return f"in {lengths.unit}: warmup {lengths.warmup}, decay {lengths.decay}{last}"


def _tokens_read(case: Case) -> int:
    """Tokens of a step, once the batch has grown, or of an evaluation, whichever are more."""
    steps = case.steps
    if steps is None:
        return 0
    length = case.config.model.seq_length
    evaluations = Evaluations.of(case.config.training, length, steps)
    return max(steps.ramp.final, evaluations.samples) * length


LENGTH_RULES: tuple[Rule, ...] = (
    Rule(
        "training_length_given",
        _LENGTHS,
        "`train_iters`, `train_samples` or `train_tokens` must be set",
        "say how long to train",
        # Fine-tuning counts epochs of data that are not read yet.
        lambda c: bool(_given(c, _LENGTHS)) or c.config.finetune.task is not None,
    ),
    Rule(
        "tokens_countable",
        (_TRAINING.eval_iters, _BATCH.global_batch_size),
        f"a step and an evaluation must each read at most {LARGEST} tokens, which 64 bits can count",
        "lower one of them",
        lambda c: _tokens_read(c) <= LARGEST,
        lambda c: f"they read up to {_tokens_read(c):.3g}",
    ),
)


def _decoupled_floor_fits(case: Case) -> bool:
    optimizer = case.config.optimizer
    peak, floor = decoupled(optimizer)
    return (peak, floor) == (optimizer.lr, optimizer.min_lr) or floor <= peak


SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule(
        "decoupled_min_lr_below_lr",
        (_OPTIMIZER.decoupled_min_lr, _OPTIMIZER.decoupled_lr, _OPTIMIZER.min_lr, _OPTIMIZER.lr),
        "`decoupled_min_lr` must be at most `decoupled_lr`, each the rest's where it is left out",
        "lower one or raise the other",
        _decoupled_floor_fits,
    ),
    Rule(
        "min_lr_below_lr",
        (_OPTIMIZER.min_lr, _OPTIMIZER.lr),
        "`min_lr` must be at most `lr`",
        "lower `--min-lr`",
        lambda c: c.config.optimizer.min_lr <= c.config.optimizer.lr,
    ),
    Rule(
        "warmup_starts_below_lr",
        (_OPTIMIZER.lr_warmup_init, _OPTIMIZER.lr, _OPTIMIZER.decoupled_lr),
        "`lr_warmup_init` must be at most `lr`, and at most `decoupled_lr` where that is set",
        "lower `--lr-warmup-init`",
        lambda c: (
            c.config.optimizer.lr_warmup_init <= min(c.config.optimizer.lr, decoupled(c.config.optimizer)[0])
        ),
    ),
    Rule(
        "one_lr_unit",
        _LR_LENGTHS,
        "warmup and decay of the learning rate must be counted in one unit",
        "give all of them in iterations, or in samples, or in tokens; only a decay in tokens may follow a "
        "warmup in iterations or samples",
        _lr_units_agree,
    ),
    Rule(
        "token_warmup_needs_token_decay",
        (_OPTIMIZER.lr_warmup_tokens, _OPTIMIZER.lr_decay_tokens),
        "`lr_decay_tokens` must be set with `lr_warmup_tokens` unless the training's length is in tokens "
        "alone",
        "set it: without it the decay would be counted in tokens here, but in Megatron-DeepSpeed in samples, "
        "from the first step on",
        lambda c: (
            not c.config.optimizer.lr_warmup_tokens
            or c.config.optimizer.lr_decay_tokens is not None
            or c.config.optimizer.lr_decay_style == "constant"
            or (c.config.training.train_iters is None and c.config.training.train_samples is None)
        ),
    ),
    Rule(
        "warmup_shorter_than_decay",
        (*_LR_WARMUP, *_LR_DECAY),
        "the warmup must be shorter than the decay of the learning rate",
        "shorten the warmup or lengthen the decay (unless given, the decay is as long as the training)",
        _warmup_shorter,
        _lengths_clause,
        in_detail=True,
    ),
    Rule(
        "wsd_decay_fits",
        (*_LR_WARMUP, *_LR_DECAY, *_LR_WSD),
        "warmup and WSD's final decay must fit into the decay length",
        "shorten one of them or lengthen the decay",
        _wsd_fits,
        _lengths_clause,
        in_detail=True,
    ),
    Rule(
        "weight_decay_grows",
        _WEIGHT_DECAY_RANGE,
        "`end_weight_decay` must be at least `start_weight_decay`",
        "swap them",
        _weight_decay_grows,
    ),
)

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

PRECISION_RULES: tuple[Rule, ...] = (
    Rule(
        "min_loss_scale_below_initial",
        (_PRECISION.min_loss_scale, _PRECISION.initial_loss_scale),
        "`min_loss_scale` must be at most `initial_loss_scale`",
        "lower the floor or raise the first scale",
        lambda c: c.config.precision.min_loss_scale <= c.config.precision.initial_loss_scale,
    ),
    Rule(
        "recompute_units_within_model",
        (_RECOMPUTE.num_layers, _RECOMPUTE.method, _MODEL.num_layers),
        "`recompute.num_layers` must be at most the number of layers, and at least 1 unless "
        "`recompute.method` is block",
        "change `--recompute-num-layers`",
        lambda c: (
            (c.config.recompute.num_layers > 0 or c.config.recompute.method == "block")
            and c.config.recompute.num_layers <= c.config.model.num_layers
        ),
    ),
    Rule(
        "recompute_modules_are_there",
        (*_MODULES, _MODEL.multi_latent_attention, _MODEL.is_hybrid_model, _MODEL.norm_position),
        "`recompute.modules` must be parts of the model: moe and moe_act of one with experts, shared_experts "
        "of one that has them, layernorm of one that normalizes the inputs of attention and MLP, mla_up_proj "
        "of one with latent attention, and in a hybrid model no whole halves and norms",
        "leave out of `--recompute-modules` what the model does not have",
        lambda c: not set(c.config.recompute.modules) & _absent_modules(c.config.model),
    ),
)
