"""Published tasks: the columns of their files and their labels, in the published order.

GLUE (Wang et al. 2019) comes as TSV files, one folder for each task; RACE (Lai et al. 2017) as folders of
JSON files. The numbers of the labels are those of Megatron's tasks and of transformers' GLUE examples where
these two agree; MNLI's are Megatron's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.tree.finetune import FinetuneConfig


@dataclass(frozen=True)
class Task:
    """The columns and the labels of a task's files.

    Attributes:
        texts: columns of the texts; of the passage and the question for multiple choice.
        label: column of the labels.
        labels: all labels in the order of their numbers; empty if only the data tell.
        choices: columns of the choices; empty for classification.
        multiple_choice: whether a sample is a question with choices.
        identity: column that names a sample; None numbers them.
        unlabelled: values of the label's column of samples that have no label.
        headless: columns of files that do not name them.
    """

    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    multiple_choice: bool = False
    identity: str | None = None
    unlabelled: tuple[str, ...] = ()
    headless: tuple[str, ...] = ()


_BINARY = ("0", "1")

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "MNLI": Task(
            ("sentence1", "sentence2"),
            "gold_label",
            ("contradiction", "entailment", "neutral"),
            identity="pairID",
            unlabelled=("-",),
        ),
        "QQP": Task(("question1", "question2"), "is_duplicate", _BINARY, identity="id"),
        "QNLI": Task(("question", "sentence"), labels=("entailment", "not_entailment"), identity="index"),
        "SST-2": Task(("sentence",), labels=_BINARY),
        "CoLA": Task(("sentence",), labels=_BINARY, headless=("source", "label", "mark", "sentence")),
        "MRPC": Task(("#1 String", "#2 String"), "Quality", _BINARY),
        "RTE": Task(("sentence1", "sentence2"), labels=("entailment", "not_entailment"), identity="index"),
        "RACE": Task(
            ("article", "question"),
            "answer",
            ("A", "B", "C", "D"),
            choices=("options",),
            multiple_choice=True,
            identity="id",
        ),
    }
)
"""Published tasks by name."""


def task_of(section: FinetuneConfig) -> Task:
    """The task that a section describes: a published one, with whatever the section says differently."""
    published = None if section.task is None else TASKS.get(section.task)
    choosing = section.task == "multiple-choice" if published is None else published.multiple_choice
    base = published or Task((), multiple_choice=choosing)
    return Task(
        section.text_columns or base.texts,
        section.label_column or base.label,
        section.labels or base.labels,
        section.choice_columns or base.choices,
        choosing,
        section.id_column or base.identity,
        base.unlabelled,
        base.headless,
    )
