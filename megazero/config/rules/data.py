"""Rules about the data, of pretraining and of fine-tuning on a labelled task."""

from __future__ import annotations

from typing import Any

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.tasks import Task, task_of
from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.words import is_number

_DATA, _FINETUNE, _MODEL, _TRAINING = paths.data, paths.finetune, paths.model, paths.training

_SPLIT_PATHS = (_DATA.train_data_path, _DATA.valid_data_path, _DATA.test_data_path)
_ALL_PATHS = (_DATA.data_path, *_SPLIT_PATHS)
_FILES: tuple[Any, ...] = (_FINETUNE.train_data, _FINETUNE.valid_data, _FINETUNE.test_data)
_COLUMNS = (_FINETUNE.task, _FINETUNE.text_columns, _FINETUNE.choice_columns)
# Less holds no text beside the marks around two of them.
_LEAST_SEQUENCE = 5


def _sources(case: Case) -> int:
    data = case.config.data
    per_split = any(value_at(case.config, path) for path in _SPLIT_PATHS)
    return sum((bool(data.data_path), per_split, data.mock_data))


def _is_blend(items: tuple[str, ...]) -> bool:
    """Whether `items` are prefixes alone, or pairs of a weight of at least 0 and a prefix."""
    if len(items) <= 1 or not any(map(is_number, items)):
        return True
    weights = items[::2]
    return len(items) % 2 == 0 and all(
        is_number(weight) and 0 <= float(weight) < float("inf") for weight in weights
    )


def _is_prepared(config: Config) -> bool:
    data = config.data
    one = data.train_idx_path if config.model.family == "bert" else data.train_doc_idx_path
    return one is not None and not data.mock_data


def _names_one(data: DataConfig) -> bool:
    names = data.data_path or data.train_data_path
    return len(names) <= 1 and not any(name.startswith("@") for name in names)


DATA_RULES: tuple[Rule, ...] = (
    Rule(
        "data_source_given",
        (*_ALL_PATHS, _DATA.mock_data),
        "the data must be given",
        "set `--data-path`, or `--train-data-path` and its siblings, or `--mock-data`",
        lambda c: _sources(c) >= 1 or c.config.finetune.task is not None,
    ),
    Rule(
        "prepared_index_of_one_dataset",
        (_DATA.train_doc_idx_path, _DATA.train_idx_path, _DATA.data_path, _DATA.train_data_path),
        "a prepared index must be of one dataset, which is named itself",
        "give the prefix of that dataset alone",
        lambda c: not _is_prepared(c.config) or _names_one(c.config.data),
    ),
    Rule(
        "one_data_source",
        (*_ALL_PATHS, _DATA.mock_data),
        "the data must come from `data_path`, from the paths of each split, or from `mock_data`",
        "keep one of the three",
        lambda c: _sources(c) <= 1,
    ),
    Rule(
        "training_data_given",
        (*_SPLIT_PATHS, _TRAINING.skip_train),
        "`train_data_path` must be set beside the other splits' paths",
        "add it, or `--skip-train`",
        lambda c: (
            bool(c.config.data.train_data_path)
            or c.config.training.skip_train
            or not (c.config.data.valid_data_path or c.config.data.test_data_path)
        ),
    ),
    Rule(
        "blend_in_pairs",
        _ALL_PATHS,
        "a data path must be prefixes alone, or pairs of a weight of at least 0 and a prefix",
        "write `0.7 first_text_document 0.3 second_text_document`",
        lambda c: all(_is_blend(value_at(c.config, path)) for path in _ALL_PATHS),
    ),
    Rule(
        "room_for_special_tokens",
        (_MODEL.family, _MODEL.seq_length),
        "`seq_length` must be at least 5 for a BERT: three special tokens and one of each segment",
        "use a longer sequence",
        lambda c: c.config.model.family != "bert" or c.config.model.seq_length >= 5,
    ),
)


def _set(case: Case) -> bool:
    return case.config.finetune.task is not None


def _task(case: Case) -> Task:
    return task_of(case.config.finetune)


def _given(case: Case, paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if value_at(case.config, path) not in (None, (), False)]


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
        (_FINETUNE.task, _FINETUNE.epochs, *_FILES),
        "`train_data` must be set with `task`, or with 0 `epochs` something to evaluate",
        "add `--train-data`, or `--valid-data` or `--test-data` with `--epochs 0`",
        lambda c: not _set(c) or bool(_given(c, _FILES[:1] if c.config.finetune.epochs else _FILES[1:])),
    ),
    Rule(
        "one_or_two_text_columns",
        _COLUMNS[:2],
        "`text_columns` must name one or two columns, unless the task is a published one",
        "add `--text-columns`",
        lambda c: not _set(c) or 1 <= len(_task(c).texts) <= 2,
    ),
    Rule(
        "choices_for_multiple_choice",
        _COLUMNS,
        "`choice_columns` must be set for multiple choice and for nothing else",
        "add or leave out `--choice-columns`",
        lambda c: not _set(c) or bool(_task(c).choices) == _task(c).multiple_choice,
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
        (_MODEL.seq_length, _FINETUNE.task),
        f"`seq_length` must be at least {_LEAST_SEQUENCE} with `task`: three special tokens and two texts",
        "make it longer",
        lambda c: not _set(c) or c.config.model.seq_length >= _LEAST_SEQUENCE,
    ),
)
