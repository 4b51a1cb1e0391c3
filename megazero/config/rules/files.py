"""Rules about tokenizer, data and checkpoints."""

from __future__ import annotations

from megazero.config.rules.rule import Case, Rule, value_at

_SPLIT_PATHS = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")
_ALL_PATHS = ("data.data_path", *_SPLIT_PATHS)
_KIND = "tokenizer.tokenizer_type"
_MODEL_KINDS = (
    "HFTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
_BERT_KINDS = ("BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZER_RULES: tuple[Rule, ...] = (
    Rule(
        "gpt2_tokenizer_files",
        (_KIND, "tokenizer.vocab_file", "tokenizer.merge_file"),
        "`vocab_file` and `merge_file` must be set with GPT2BPETokenizer, the default kind",
        "add `--vocab-file vocab.json --merge-file merges.txt`, or name the kind with `--tokenizer-type`",
        lambda c: (
            c.config.tokenizer.tokenizer_type != "GPT2BPETokenizer"
            or bool(c.config.tokenizer.vocab_file and c.config.tokenizer.merge_file)
        ),
    ),
    Rule(
        "tokenizer_model_given",
        (_KIND, "tokenizer.tokenizer_model"),
        f"`tokenizer_model` must be set with {', '.join(_MODEL_KINDS)}",
        "add `--tokenizer-model` with the file",
        lambda c: (
            c.config.tokenizer.tokenizer_type not in _MODEL_KINDS or bool(c.config.tokenizer.tokenizer_model)
        ),
    ),
    Rule(
        "wordpiece_vocab_file",
        (_KIND, "tokenizer.vocab_file"),
        f"`vocab_file` must be set with {', '.join(_BERT_KINDS)}",
        "add `--vocab-file vocab.txt`",
        lambda c: c.config.tokenizer.tokenizer_type not in _BERT_KINDS or bool(c.config.tokenizer.vocab_file),
    ),
    Rule(
        "null_tokenizer_vocab_size",
        (_KIND, "model.vocab_size"),
        "`vocab_size` must be set with NullTokenizer",
        "add `--vocab-size`",
        lambda c: (
            c.config.tokenizer.tokenizer_type != "NullTokenizer" or c.config.model.vocab_size is not None
        ),
    ),
)


def _sources(case: Case) -> int:
    data = case.config.data
    per_split = any(value_at(case.config, path) for path in _SPLIT_PATHS)
    return sum((bool(data.data_path), per_split, data.mock_data))


def _is_blend(items: tuple[str, ...]) -> bool:
    """Whether `items` are prefixes alone, or pairs of a positive weight and a prefix."""
    if len(items) <= 1 or not any(map(_is_number, items)):
        return True
    weights = items[::2]
    return len(items) % 2 == 0 and all(
        _is_number(weight) and 0 < float(weight) < float("inf") for weight in weights
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_GOES_BACK = tuple(f"checkpoint.{name}" for name in ("save", "save_interval", "no_save_optim"))

DATA_RULES: tuple[Rule, ...] = (
    Rule(
        "data_source_given",
        (*_ALL_PATHS, "data.mock_data"),
        "the data must be given",
        "set `--data-path`, or `--train-data-path` and its siblings, or `--mock-data`",
        lambda c: _sources(c) >= 1 or c.config.finetune.task is not None,
    ),
    Rule(
        "one_data_source",
        (*_ALL_PATHS, "data.mock_data"),
        "the data must come from `data_path`, from the paths of each split, or from `mock_data`",
        "keep one of the three",
        lambda c: _sources(c) <= 1,
    ),
    Rule(
        "training_data_given",
        (*_SPLIT_PATHS, "training.skip_train"),
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
        "a data path must be prefixes alone, or pairs of a positive weight and a prefix",
        "write `0.7 first_text_document 0.3 second_text_document`",
        lambda c: all(_is_blend(value_at(c.config, path)) for path in _ALL_PATHS),
    ),
    Rule(
        "room_for_special_tokens",
        ("model.family", "model.seq_length"),
        "`seq_length` must be at least 5 for a BERT: three special tokens and one of each segment",
        "use a longer sequence",
        lambda c: c.config.model.family != "bert" or c.config.model.seq_length >= 5,
    ),
)

OUTPUT_RULES: tuple[Rule, ...] = (
    Rule(
        "rollback_needs_checkpoints",
        ("guards.on_spike", "guards.on_weights_differ", *_GOES_BACK),
        "`save`, `save_interval` and the optimizer's state in checkpoints must be there to go back to",
        "set `--save` and `--save-interval` without `--no-save-optim`, or choose another reaction",
        lambda c: (
            (c.config.guards.on_spike != "rollback" and c.config.guards.on_weights_differ != "checkpoint")
            or (
                bool(c.config.checkpoint.save)
                and c.config.checkpoint.save_interval is not None
                and not c.config.checkpoint.no_save_optim
            )
        ),
    ),
)
