"""Rules about the data."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule, value_at
from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.words import is_number

_DATA, _MODEL, _TRAINING = paths.data, paths.model, paths.training

_SPLIT_PATHS = (_DATA.train_data_path, _DATA.valid_data_path, _DATA.test_data_path)
_ALL_PATHS = (_DATA.data_path, *_SPLIT_PATHS)


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
