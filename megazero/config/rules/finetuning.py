"""Rules about fine-tuning on a labelled task."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.tasks import Task, task_of

_FINETUNE, _MODEL = paths.finetune, paths.model

_TASK = _FINETUNE.task
_FILES = (_FINETUNE.train_data, _FINETUNE.valid_data, _FINETUNE.test_data)
_COLUMNS = (_TASK, _FINETUNE.text_columns, _FINETUNE.choice_columns)
# Less holds no text beside the marks around two of them.
_LEAST_SEQUENCE = 5


def _set(case: Case) -> bool:
    return case.config.finetune.task is not None


def _task(case: Case) -> Task:
    return task_of(case.config.finetune)


def _given(case: Case, paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if value_at(case.config, path) not in (None, (), False)]


def _columns_fit(case: Case) -> bool:
    return not _set(case) or 1 <= len(_task(case).texts) <= 2


def _choices_fit(case: Case) -> bool:
    return not _set(case) or bool(_task(case).choices) == _task(case).multiple_choice


def _labels_fit(case: Case) -> bool:
    labels = _task(case).labels.values if _set(case) else ()
    return not labels or (len(labels) >= 2 and len(set(labels)) == len(labels))


def _classes_fit(case: Case) -> bool:
    classes = case.config.model.num_classes
    if classes is None or not _set(case):
        return True
    task = _task(case)
    if task.multiple_choice:
        return classes == 1
    return classes == len(task.labels.values) if task.labels.values else classes >= 2


FINETUNING_RULES: tuple[Rule, ...] = (
    Rule(
        "task_has_data",
        (_TASK, _FINETUNE.epochs, *_FILES),
        "`train_data` must be set with `task`, or with 0 `epochs` something to evaluate",
        "add `--train-data`, or `--valid-data` or `--test-data` with `--epochs 0`",
        lambda c: not _set(c) or bool(_given(c, _FILES[:1] if c.config.finetune.epochs else _FILES[1:])),
    ),
    Rule(
        "one_or_two_text_columns",
        _COLUMNS[:2],
        "`text_columns` must name one or two columns, unless the task is a published one",
        "add `--text-columns`",
        _columns_fit,
    ),
    Rule(
        "choices_for_multiple_choice",
        _COLUMNS,
        "`choice_columns` must be set for multiple choice and for nothing else",
        "add or leave out `--choice-columns`",
        _choices_fit,
    ),
    Rule(
        "labels_differ",
        (_FINETUNE.labels,),
        "`labels` must be two or more, all different",
        "name each label once",
        _labels_fit,
    ),
    Rule(
        "classes_are_the_labels",
        (_MODEL.num_classes, _FINETUNE.labels),
        "`num_classes` must be the number of labels, or 1 for multiple choice",
        "leave `--num-classes` out",
        _classes_fit,
    ),
    Rule(
        "sequence_holds_marks_and_text",
        (_MODEL.seq_length, _TASK),
        f"`seq_length` must be at least {_LEAST_SEQUENCE} with `task`: three special tokens and two texts",
        "make it longer",
        lambda c: not _set(c) or c.config.model.seq_length >= _LEAST_SEQUENCE,
    ),
)
