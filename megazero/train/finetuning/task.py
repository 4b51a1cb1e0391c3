"""Reads the labelled files of a task, and completes the configuration by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.folder import candidates
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.reader import Verify
from megazero.config.tasks import Task, task_of
from megazero.config.tree.config import Config
from megazero.data.labelled.dataset import LabelledSamples
from megazero.data.labelled.encode import SampleEncoder, encode_samples
from megazero.data.labelled.files import LabelledFile, read_labelled
from megazero.errors import ConfigError, DataError
from megazero.formats.hf.config_json import Description
from megazero.mpu.context import ParallelContext
from megazero.train.finetuning.epochs import over_epochs
from megazero.train.parts.families import FAMILIES
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.saved import Checkpoint


@dataclass(frozen=True)
class LabelledSplit:
    """The files of a split and their encoded samples, in the order of the files."""

    files: tuple[LabelledFile, ...]
    samples: LabelledSamples

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class TaskData:
    """The labelled samples of a run.

    Attributes:
        labels: the names of the classes.
        train, valid, test: the splits; None for one without files.
    """

    labels: tuple[str, ...]
    train: LabelledSplit | None
    valid: LabelledSplit | None
    test: LabelledSplit | None

    @property
    def remarks(self) -> list[str]:
        """Remarks on samples of the files that were omitted."""
        splits = (self.train, self.valid, self.test)
        return [line for split in splits if split for file in split.files for line in file.remarks]


def read_task(config: Config, vocabulary: Vocabulary) -> TaskData:
    """Read and encode all labelled files of a run.

    Raises:
        ConfigError: there is no tokenizer, or the labels are unknown.
        DataError: a file is missing or unsuitable, or a label is not one of the task's.
    """
    section, task = config.finetune, task_of(config.finetune)
    if vocabulary.tokenizer is None:
        raise ConfigError(
            "`tokenizer_type` must be set to read labelled texts, but is not; set --tokenizer-type"
        )
    causal = FAMILIES[config.model.family].models.causal
    encoder = SampleEncoder.of(vocabulary.tokenizer, config.model.seq_length, causal=causal)
    paths = (section.train_data if section.epochs else (), section.valid_data, section.test_data)
    read = [
        tuple(read_labelled(path, task, labels_needed=needed) for path in listed)
        for listed, needed in zip(paths, (True, True, False), strict=True)
    ]
    labels = _labels(config, task, read[0])
    splits = [
        LabelledSplit(files, encode_samples(files, labels, encoder, choosing=task.multiple_choice))
        if files
        else None
        for files in read
    ]
    return TaskData(labels, *splits)


def completed(config: Config, data: TaskData, context: ParallelContext) -> Config:
    """Complete the configuration by the data: labels, number of classes, global batch and length.

    Raises:
        ConfigError: a given setting contradicts the data.
    """
    classes = 1 if task_of(config.finetune).multiple_choice else len(data.labels)
    if config.model.num_classes not in (None, classes):
        raise ConfigError(
            f"`num_classes` must be {classes} for these labels, but is {config.model.num_classes}; leave it "
            "out"
        )
    model, finetune = {"num_classes": classes}, {"labels": data.labels}
    count = None if data.train is None else len(data.train)
    return over_epochs(config, count, context, model=model, finetune=finetune)


def _labels(config: Config, task: Task, train: Sequence[LabelledFile]) -> tuple[str, ...]:
    """The labels: those of the task, else of the training data, else of the pretrained weights."""
    if task.labels.values:
        return task.labels.values
    samples = (sample for file in train for sample in file.samples)
    seen = sorted({sample.label for sample in samples if sample.label is not None})
    if len(seen) == 1:
        raise DataError(
            f"`label` must have two values or more in the training data, but is always {seen[0][:40]!r}; "
            "check --label-column."
        )
    if seen:
        return tuple(seen)
    section, pretrained = config.checkpoint, config.finetune.pretrained_checkpoint
    folders = list(candidates(section.load, section.ckpt_step).folders[:1]) if section.load else []
    folders += [one_checkpoint(pretrained)] if pretrained else []
    for folder in folders:
        saved = Checkpoint(folder, verify=Verify.SIZE).model.sections.get("finetune", {})
        if saved.get("labels"):
            return tuple(saved["labels"])
    if path := config.checkpoint.load_hf:
        folder = Path(config.data.object_cache.model_folder(path))
        if names := Description.read(folder).labels:
            return names
    raise ConfigError(
        "`labels` must be known, but neither the task, training data nor the weights tell; set --labels"
    )
