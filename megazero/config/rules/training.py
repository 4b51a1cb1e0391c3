"""Rules about the length of the training, its optimizer and schedules, precision and recompute."""

from __future__ import annotations

from megazero.config.derive import decoupled
from megazero.config.fields import paths
from megazero.config.numbers import LARGEST
from megazero.config.rules.rule import Case, rule, value_at
from megazero.config.steps import UNITS
from megazero.config.training_plan import LR_LENGTHS, Evaluations, Limits, LrLengths
from megazero.config.tree.model import ModelConfig

_MODEL, _OPTIMIZER, _PRECISION, _RECOMPUTE = paths.model, paths.optimizer, paths.precision, paths.recompute

_LENGTHS = tuple(f"training.train_{unit}" for unit in UNITS)
_LR_DECAY = tuple(f"optimizer.lr_decay_{unit}" for unit in UNITS)
_LR_WARMUP = tuple(f"optimizer.lr_warmup_{unit}" for unit in UNITS)
_LR_WSD = tuple(f"optimizer.lr_wsd_decay_{unit}" for unit in UNITS)
_LR_LENGTHS = tuple(f"optimizer.{name}" for name in LR_LENGTHS)
_MODULES = (_RECOMPUTE.modules, _MODEL.num_experts, _MODEL.moe_shared_expert_intermediate_size)


def _given(case: Case, paths: tuple[str, ...]) -> list[str]:
    """The paths whose value is neither None nor 0, off or empty."""
    return [path for path in paths if value_at(case.config, path)]


def _units(case: Case, paths: tuple[str, ...]) -> set[str]:
    return {path.rsplit("_", 1)[1] for path in _given(case, paths)}


def _absent_modules(model: ModelConfig) -> set[str]:
    """The values of `recompute.modules` whose part no layer of the model has."""
    absent = set() if model.num_experts else {"moe", "moe_act", "shared_experts"}
    absent |= set() if model.multi_latent_attention else {"mla_up_proj"}
    absent |= set() if "*-" in (model.layer_parts or ("*-",)) else {"layernorm", "mlp", "moe"}
    absent |= set() if model.moe_shared_expert_intermediate_size else {"shared_experts"}
    return absent | ({"layernorm"} if model.norm_position == "output" else set())


def _lr(case: Case) -> LrLengths | None:
    """The schedule's lengths; None where a broken rule leaves them undefined."""
    steps = case.steps
    if not one_lr_unit.holds(case) or not _given(case, _LENGTHS) or steps is None:
        return None
    optimizer, training = case.config.optimizer, case.config.training
    return LrLengths.of(optimizer, training, steps, Limits.of(training).end(steps))


def _lengths_clause(case: Case) -> str:
    lengths = _lr(case)
    if lengths is None:
        return "the lengths are unknown"
    last = f", final decay {lengths.wsd_decay}" if lengths.wsd_decay else ""
    return f"in {lengths.unit}: warmup {lengths.warmup}, decay {lengths.decay}{last}"


def _tokens_read(case: Case) -> int:
    """The tokens of the largest step or of an evaluation, whichever are more."""
    steps = case.steps
    if steps is None:
        return 0
    length = case.model.seq_length
    evaluations = Evaluations.of(case.config.training, length, steps)
    return max(steps.ramp.final, evaluations.samples) * length


@rule(_LENGTHS, "say how long to train")
def training_length_given(case: Case) -> bool:
    """`train_iters`, `train_samples` or `train_tokens` must be set"""
    # Fine-tuning counts epochs of data that are not read yet.
    return bool(_given(case, _LENGTHS)) or case.config.finetune.task is not None


@rule(
    (paths.training.eval_iters, paths.batch.global_batch_size),
    "lower one of them",
    detail=lambda c: f"they read up to {_tokens_read(c):.3g}",
)
def tokens_countable(case: Case) -> bool:
    """a step and an evaluation must each read at most 9223372036854775807 tokens, which 64 bits can count"""
    return _tokens_read(case) <= LARGEST


@rule(
    (_OPTIMIZER.decoupled_min_lr, _OPTIMIZER.decoupled_lr, _OPTIMIZER.min_lr, _OPTIMIZER.lr),
    "lower one or raise the other",
)
def decoupled_min_lr_below_lr(case: Case) -> bool:
    """`decoupled_min_lr` must be at most `decoupled_lr`; left out, they are `min_lr` and `lr`"""
    optimizer = case.config.optimizer
    peak, floor = decoupled(optimizer)
    return (peak, floor) == (optimizer.lr, optimizer.min_lr) or floor <= peak


@rule((_OPTIMIZER.min_lr, _OPTIMIZER.lr), "lower `--min-lr`")
def min_lr_below_lr(case: Case) -> bool:
    """`min_lr` must be at most `lr`"""
    return case.config.optimizer.min_lr <= case.config.optimizer.lr


@rule((_OPTIMIZER.lr_warmup_init, _OPTIMIZER.lr, _OPTIMIZER.decoupled_lr), "lower `--lr-warmup-init`")
def warmup_starts_below_lr(case: Case) -> bool:
    """`lr_warmup_init` must be at most `lr`, and at most `decoupled_lr` where that is set"""
    optimizer = case.config.optimizer
    return optimizer.lr_warmup_init <= min(optimizer.lr, decoupled(optimizer)[0])


@rule(
    _LR_LENGTHS,
    "give all of them in iterations, or in samples, or in tokens; only a decay in tokens may follow a "
    "warmup in iterations or samples",
)
def one_lr_unit(case: Case) -> bool:
    """warmup and decay of the learning rate must be counted in one unit"""
    warmup = _units(case, _LR_WARMUP)
    decay = _units(case, tuple(path for path in _LR_LENGTHS if path not in _LR_WARMUP))
    return len(warmup | decay) <= 1 or (len(warmup) == 1 and decay == {"tokens"})


@rule(
    (_OPTIMIZER.lr_warmup_tokens, _OPTIMIZER.lr_decay_tokens),
    "set it: without it the decay would be counted in tokens here, but in Megatron-DeepSpeed in samples, "
    "from the first step on",
)
def token_warmup_needs_token_decay(case: Case) -> bool:
    """`lr_decay_tokens` must be set with `lr_warmup_tokens` unless the training's length is in tokens
    alone"""
    optimizer, training = case.config.optimizer, case.config.training
    if not optimizer.lr_warmup_tokens or optimizer.lr_decay_style == "constant":
        return True
    in_tokens = training.train_iters is None and training.train_samples is None
    return in_tokens or optimizer.lr_decay_tokens is not None


@rule(
    (*_LR_WARMUP, *_LR_DECAY),
    "shorten the warmup or lengthen the decay (unless given, the decay is as long as the training)",
    facts=_lengths_clause,
)
def warmup_shorter_than_decay(case: Case) -> bool:
    """the warmup must be shorter than the decay of the learning rate"""
    lengths = _lr(case)
    return lengths is None or lengths.warmup == 0 or lengths.warmup < lengths.decay


@rule((*_LR_WARMUP, *_LR_DECAY, *_LR_WSD), "shorten one of them or lengthen the decay", facts=_lengths_clause)
def wsd_decay_fits(case: Case) -> bool:
    """warmup and WSD's final decay must fit into the decay length"""
    lengths = _lr(case)
    return lengths is None or lengths.wsd_decay is None or lengths.warmup + lengths.wsd_decay <= lengths.decay


@rule((_OPTIMIZER.start_weight_decay, _OPTIMIZER.end_weight_decay), "swap them")
def weight_decay_grows(case: Case) -> bool:
    """`end_weight_decay` must be at least `start_weight_decay`"""
    start, end = case.config.optimizer.start_weight_decay, case.config.optimizer.end_weight_decay
    return start is None or end is None or start <= end


@rule((_OPTIMIZER.lamb_min_coeff, _OPTIMIZER.lamb_max_coeff), "lower `--lamb-min-coeff`")
def lamb_bounds_ordered(case: Case) -> bool:
    """`lamb_min_coeff` must be at most `lamb_max_coeff`"""
    return case.config.optimizer.lamb_min_coeff <= case.config.optimizer.lamb_max_coeff


@rule(
    (_OPTIMIZER.muon_coefficient_type, _OPTIMIZER.muon_num_ns_steps),
    "set `--muon-num-ns-steps 5` or `--muon-coefficient-type simple`",
)
def muon_quintic_in_fives(case: Case) -> bool:
    """`muon_num_ns_steps` must be a multiple of 5 unless `muon_coefficient_type` is simple"""
    optimizer = case.config.optimizer
    return optimizer.muon_coefficient_type == "simple" or optimizer.muon_num_ns_steps % 5 == 0


@rule(
    (_OPTIMIZER.onebit_lamb_factor_min, _OPTIMIZER.onebit_lamb_factor_max), "lower `--onebit-lamb-factor-min`"
)
def onebit_lamb_factors_ordered(case: Case) -> bool:
    """`onebit_lamb_factor_min` must be at most `onebit_lamb_factor_max`"""
    return case.config.optimizer.onebit_lamb_factor_min <= case.config.optimizer.onebit_lamb_factor_max


@rule((_PRECISION.min_loss_scale, _PRECISION.initial_loss_scale), "lower the floor or raise the first scale")
def min_loss_scale_below_initial(case: Case) -> bool:
    """`min_loss_scale` must be at most `initial_loss_scale`"""
    return case.config.precision.min_loss_scale <= case.config.precision.initial_loss_scale


@rule((_RECOMPUTE.num_layers, _RECOMPUTE.method, _MODEL.num_layers), "change `--recompute-num-layers`")
def recompute_units_within_model(case: Case) -> bool:
    """`recompute.num_layers` must be at most the number of layers, and at least 1 unless `recompute.method`
    is block"""
    recompute = case.config.recompute
    least = 0 if recompute.method == "block" else 1
    return least <= recompute.num_layers <= case.model.num_layers


@rule(
    (*_MODULES, _MODEL.multi_latent_attention, _MODEL.is_hybrid_model, _MODEL.norm_position),
    "leave out of `--recompute-modules` what the model does not have",
)
def recompute_modules_are_there(case: Case) -> bool:
    """`recompute.modules` must be parts of the model: moe and moe_act need experts, shared_experts needs
    shared experts, layernorm needs norms of the inputs of attention and MLP, mla_up_proj needs latent
    attention, and a hybrid model has no layernorm, mlp and moe to recompute"""
    return not set(case.config.recompute.modules) & _absent_modules(case.model)
