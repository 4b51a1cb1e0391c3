"""Rules about distillation. What only the teacher's checkpoint knows is checked when it is opened."""

from __future__ import annotations

from megazero.config.rules.rule import Rule, value_at

_SWITCH = "distillation.kd"
_TEACHER = "distillation.load_teacher"
_DETAILS = (
    "distillation.kd_train_iters",
    "distillation.num_layers_teacher",
    "distillation.hidden_size_teacher",
    "distillation.num_attention_heads_teacher",
    "distillation.num_experts_teacher",
)
_FACTORS = ("distillation.kd_beta_ce", "distillation.kd_temp")

DISTILLATION_RULES: tuple[Rule, ...] = (
    Rule(
        "distillation_has_a_teacher",
        (_TEACHER,),
        "`load_teacher` must be set with `kd`",
        "name the folder of the teacher's run, or leave out `--kd`",
        lambda case: not case.config.distillation.kd or case.config.distillation.load_teacher is not None,
        reads=(_SWITCH,),
    ),
    Rule(
        "teacher_is_for_distillation",
        (_SWITCH,),
        "`kd` must be on where anything about a teacher is set",
        "add `--kd`, or leave out what is about the teacher",
        lambda case: (
            case.config.distillation.kd
            or (
                all(value_at(case.config, path) in (None, ()) for path in (_TEACHER, *_DETAILS))
                and all(value_at(case.config, path) == 1.0 for path in _FACTORS)
            )
        ),
        reads=(_TEACHER, *_DETAILS, *_FACTORS),
    ),
    Rule(
        "distillation_is_for_gpt",
        ("model.family",),
        "`family` must be gpt with `kd`",
        "leave out `--kd`",
        lambda case: not case.config.distillation.kd or case.config.model.family == "gpt",
        reads=(_SWITCH,),
    ),
    Rule(
        "distillation_is_for_pretraining",
        (_SWITCH, "finetune.task"),
        "`kd` must be off where a model is fine-tuned for a task",
        "leave out `--kd`",
        lambda case: not case.config.distillation.kd or case.config.finetune.task is None,
    ),
)
