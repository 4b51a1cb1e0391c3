"""The section `finetune`: fine-tuning on labelled samples, conversations and preferences."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import NonNegativeInt

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

Labelled = Literal[
    "classification", "multiple-choice", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "MRPC", "RTE", "RACE"
]
OfAnswers = Literal["chat", "preference", "reward"]
OF_ANSWERS = get_args(OfAnswers)
"""The tasks whose samples are answers in conversations."""
OF_WORDS = ("chat", "preference")
"""Those of them that train a model that predicts words; others have a head of their own."""
_ANY = here.task.because("the corpus of pretraining is `--data-path`")
_ANSWERS = here.task.among(*OF_ANSWERS)
_LABELLED = here.task.among(*get_args(Labelled)).because("other tasks have no labels")


class FinetuneConfig(Section):
    """Fine-tuning on a labelled task, on conversations or on preferences"""

    needs = _LABELLED

    task: Literal[Labelled, OfAnswers] | None = option(
        None,
        refused={"STS-B": "has scores instead of labels, and regression is not offered"},
        needs=(
            when(OF_ANSWERS, config.model.family == "gpt").because("answers are read from left to right"),
            when(OF_ANSWERS, config.tokenizer.tokenizer_type == "HFTokenizer").because(
                "chat templates come with a tokenizer.json"
            ),
        ),
    )
    """what finetune.py trains: classification of one or two texts, multiple-choice, or a published task,
    whose columns and labels are known; chat: the answers of conversations; preference: answers that are
    preferred to others; reward: a model that scores answers"""
    train_data: tuple[str, ...] = option((), roles=Role.FILE, needs=_ANY)
    """files to train on: labelled, TSV or JSONL, for RACE folders too; or conversations or pairs of answers,
    JSON lines or Parquet"""
    valid_data: tuple[str, ...] = option((), roles=Role.FILE, needs=_ANY)
    """files to evaluate after each epoch"""
    test_data: tuple[str, ...] = option((), roles=Role.FILE)
    """files to evaluate at the end, with the best epoch's model; labels may be missing"""
    text_columns: tuple[str, ...] = option(())
    """classification: the columns of the first text and of the second if there is one; multiple-choice: of
    the passage and of the question if there is one"""
    choice_columns: tuple[str, ...] = option(())
    """multiple-choice: one column for each choice, or one of JSONL that lists them"""
    label_column: str | None = option(None)
    """the column of the labels; default: label"""
    id_column: str | None = option(None)
    """the column that names samples in --predictions; default: none"""
    labels: tuple[str, ...] = option(())
    """all labels, in the order of their numbers; default: the task's, else those of the training data,
    sorted, or to evaluate those of the checkpoint"""
    epochs: NonNegativeInt = option(3, needs=())
    """passes over the training data; 0 only evaluates"""
    best_metric: Literal["accuracy", "macro_f1", "loss"] = option(
        "accuracy", needs=(_LABELLED, here.valid_data)
    )
    """by which figure of the validation files the best epoch is chosen; of equal ones the first is kept"""
    pretrained_checkpoint: str | None = option(None, needs=_ANY)
    """folder of a run, or of one checkpoint, to take the weights from"""
    predictions: str | None = option(
        None, roles=Role.LOCAL | Role.OUTPUT, needs=(_LABELLED, here.valid_data | here.test_data)
    )
    """file that gets the id, label, prediction and probabilities of each test sample, or of each validation
    sample without --test-data: TSV, or JSONL by its name"""
    chat_template: str | None = option(None, roles=Role.FILE, needs=_ANSWERS)
    """file of a chat template, jinja, to use instead of the tokenizer's"""
    allow_special_tokens: bool = option(False, needs=_ANSWERS)
    """let messages name special tokens, and mean them"""
