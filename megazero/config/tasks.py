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
class LabelColumn:
    """The column of a task's labels.

    Attributes:
        name: the column.
        values: all labels in the order of their numbers; empty if only the data tell.
        unlabelled: values of samples that have no label.
    """

    name: str = "label"
    values: tuple[str, ...] = ()
    unlabelled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """The columns and the labels of a task's files.

    Attributes:
        texts: columns of the texts; of the passage and the question for multiple choice.
        labels: the column of the labels.
        choices: columns of the choices; empty for classification.
        multiple_choice: whether a sample is a question with choices.
        identity: column that names a sample; None numbers them.
        headless: columns of files that do not name them.
    """

    texts: tuple[str, ...]
    labels: LabelColumn = LabelColumn()
    choices: tuple[str, ...] = ()
    multiple_choice: bool = False
    identity: str | None = None
    headless: tuple[str, ...] = ()


_BINARY = ("0", "1")
_ENTAILMENT = LabelColumn(values=("entailment", "not_entailment"))

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "MNLI": Task(
            ("sentence1", "sentence2"),
            LabelColumn("gold_label", ("contradiction", "entailment", "neutral"), unlabelled=("-",)),
            identity="pairID",
        ),
        "QQP": Task(("question1", "question2"), LabelColumn("is_duplicate", _BINARY), identity="id"),
        "QNLI": Task(("question", "sentence"), _ENTAILMENT, identity="index"),
        "SST-2": Task(("sentence",), LabelColumn(values=_BINARY)),
        "CoLA": Task(
            ("sentence",), LabelColumn(values=_BINARY), headless=("source", "label", "mark", "sentence")
        ),
        "MRPC": Task(("#1 String", "#2 String"), LabelColumn("Quality", _BINARY)),
        "RTE": Task(("sentence1", "sentence2"), _ENTAILMENT, identity="index"),
        "RACE": Task(
            ("article", "question"),
            LabelColumn("answer", ("A", "B", "C", "D")),
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
        LabelColumn(
            section.label_column or base.labels.name,
            section.labels or base.labels.values,
            base.labels.unlabelled,
        ),
        section.choice_columns or base.choices,
        choosing,
        section.id_column or base.identity,
        base.headless,
    )
