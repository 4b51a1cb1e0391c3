"""Rules about the data, of pretraining and of fine-tuning on a labelled task."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, rule, value_at
from megazero.config.tasks import Task, task_of
from megazero.config.tree.finetune import OF_ANSWERS
from megazero.config.words import is_number

_DATA, _FINETUNE, _MODEL, _TRAINING = paths.data, paths.finetune, paths.model, paths.training

_SPLIT_PATHS = (_DATA.train_data_path, _DATA.valid_data_path, _DATA.test_data_path)
_ALL_PATHS = (_DATA.data_path, *_SPLIT_PATHS)
_FILES = (_FINETUNE.train_data, _FINETUNE.valid_data, _FINETUNE.test_data)
_COLUMNS = (_FINETUNE.task, _FINETUNE.text_columns, _FINETUNE.choice_columns)


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


def _is_prepared(case: Case) -> bool:
    data = case.config.data
    index = data.train_idx_path if case.model.family == "bert" else data.train_doc_idx_path
    return index is not None and not data.mock_data


@rule(
    (*_ALL_PATHS, _DATA.mock_data),
    "set `--data-path`, or `--train-data-path` and its siblings, or `--mock-data`",
)
def data_source_given(case: Case) -> bool:
    """the data must be given"""
    tasks = case.config.finetune.task, case.config.policy.policy_method
    return _sources(case) >= 1 or any(tasks)


@rule(
    (_DATA.train_doc_idx_path, _DATA.train_idx_path, _DATA.data_path, _DATA.train_data_path),
    "give the prefix of that dataset alone",
    where=_is_prepared,
)
def prepared_index_of_one_dataset(case: Case) -> bool:
    """a prepared index must be of one dataset, which is named itself"""
    names = case.config.data.data_path or case.config.data.train_data_path
    return len(names) <= 1 and not any(name.startswith("@") for name in names)


@rule((*_ALL_PATHS, _DATA.mock_data), "keep one of the three")
def one_data_source(case: Case) -> bool:
    """the data must come from `data_path`, from the paths of each split, or from `mock_data`"""
    return _sources(case) <= 1


@rule((*_SPLIT_PATHS, _TRAINING.skip_train), "add it, or `--skip-train`")
def training_data_given(case: Case) -> bool:
    """`train_data_path` must be set beside the other splits' paths"""
    data = case.config.data
    if data.train_data_path or case.config.training.skip_train:
        return True
    return not (data.valid_data_path or data.test_data_path)


@rule(_ALL_PATHS, "write `0.7 first_text_document 0.3 second_text_document`")
def blend_in_pairs(case: Case) -> bool:
    """a data path must be prefixes alone, or pairs of a weight of at least 0 and a prefix"""
    return all(_is_blend(value_at(case.config, path)) for path in _ALL_PATHS)


@rule((_MODEL.family, _MODEL.seq_length), "use a longer sequence")
def room_for_special_tokens(case: Case) -> bool:
    """`seq_length` must be at least 5 for a BERT: three special tokens and one of each segment"""
    return case.model.family != "bert" or case.model.seq_length >= 5


def _fine_tunes(case: Case) -> bool:
    return case.config.finetune.task is not None


def _has_labels(case: Case) -> bool:
    return _fine_tunes(case) and case.config.finetune.task not in OF_ANSWERS


def _task(case: Case) -> Task:
    return task_of(case.config.finetune)


@rule(
    (_FINETUNE.task, _FINETUNE.epochs, *_FILES),
    "add `--train-data`, or `--valid-data` or `--test-data` with `--epochs 0`",
    where=_fine_tunes,
)
def task_has_data(case: Case) -> bool:
    """`train_data` must be set with `task`; with 0 `epochs`, `valid_data` or `test_data` must be"""
    finetune = case.config.finetune
    return bool(finetune.train_data if finetune.epochs else finetune.valid_data or finetune.test_data)


@rule(_COLUMNS[:2], "add `--text-columns`", where=_has_labels)
def one_or_two_text_columns(case: Case) -> bool:
    """`text_columns` must name one or two columns, unless the task is a published one"""
    return 1 <= len(_task(case).texts) <= 2


@rule(_COLUMNS, "add or leave out `--choice-columns`", where=_has_labels)
def choices_for_multiple_choice(case: Case) -> bool:
    """`choice_columns` must be set for multiple choice and for nothing else"""
    return bool(_task(case).choices) == _task(case).multiple_choice


@rule((_FINETUNE.labels,), "name each label once", where=_has_labels)
def labels_differ(case: Case) -> bool:
    """`labels` must be two or more, all different"""
    labels = _task(case).labels.values
    return not labels or (len(labels) >= 2 and len(set(labels)) == len(labels))


@rule((_MODEL.num_classes, _FINETUNE.labels), "leave `--num-classes` out", where=_has_labels)
def classes_are_the_labels(case: Case) -> bool:
    """`num_classes` must be the number of labels, or 1 for multiple choice"""
    classes, task = case.model.num_classes, _task(case)
    if classes is None:
        return True
    if task.multiple_choice:
        return classes == 1
    return classes == len(task.labels.values) if task.labels.values else classes >= 2


@rule((_MODEL.seq_length, _FINETUNE.task), "make it longer", where=_fine_tunes)
def sequence_holds_marks_and_text(case: Case) -> bool:
    """`seq_length` must be at least 5 with `task`: three special tokens and two texts"""
    return case.model.seq_length >= 5
