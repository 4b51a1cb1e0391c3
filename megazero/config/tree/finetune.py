"""The section `finetune`: fine-tuning on labelled samples."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from megazero.config.condition import here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role


class FinetuneConfig(Section):
    """Fine-tuning on a labelled task"""

    needs = here.task.because("the corpus of pretraining is `--data-path`")

    task: (
        Literal[
            "classification", "multiple-choice", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "MRPC", "RTE", "RACE"
        ]
        | None
    ) = option(
        None, refused={"STS-B": "has scores instead of labels, and regression is not offered"}, needs=()
    )
    """what finetune.py trains: classification of one or two texts, multiple-choice, or a published task,
    whose columns and labels are known"""
    train_data: tuple[str, ...] = option((), roles=Role.FILE)
    """labelled files to train on: TSV or JSONL, for RACE folders too"""
    valid_data: tuple[str, ...] = option((), roles=Role.FILE)
    """labelled files to evaluate after each epoch"""
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
        "accuracy", needs=(here.task, here.valid_data)
    )
    """by which figure of the validation files the best epoch is chosen; of equal ones the first is kept"""
    pretrained_checkpoint: str | None = option(None)
    """folder of a run, or of one checkpoint, to take the weights from"""
    predictions: str | None = option(
        None, roles=Role.LOCAL | Role.OUTPUT, needs=(here.task, here.valid_data | here.test_data)
    )
    """file that gets the id, label, prediction and probabilities of each test sample, or of each validation
    sample without --test-data: TSV, or JSONL by its name"""
