"""The initial weights of fine-tuning, from a pretrained model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from megazero.checkpoint.part import Source
from megazero.checkpoint.saver import together
from megazero.config.derive import FREE_MODEL_FIELDS
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.sparse import SPARSE_FIELDS
from megazero.errors import CheckpointError
from megazero.formats.hf.config_json import Description
from megazero.formats.hf.reader import HFReader
from megazero.models.classifier import OWN, PRETRAINING_ONLY
from megazero.mpu.context import ParallelContext
from megazero.train.resume.fit import OF_THE_HEAD, check_model, free_to_begin
from megazero.train.resume.saved import Checkpoint
from megazero.train.resume.weights import Opener, take_weights
from megazero.train.step.engine import Engine


def take_pretrained(
    config: Config, context: ParallelContext, vocab_size: int, engine: Engine
) -> tuple[str, ...]:
    """Load the weights of `--pretrained-checkpoint` or `--load-hf`; every rank calls this.

    Weights of pretraining heads are not loaded, and weights that only a classifier has keep their initial
    values. The weights of a classifier are loaded if its labels are the same.

    Returns:
        Remarks for a person.

    Raises:
        CheckpointError: on every rank: it is another model or cannot be read, or there is no training and it
            has no classifier for these labels.
    """
    pretrained, hugging_face = config.finetune.pretrained_checkpoint, config.checkpoint.load_hf
    without: tuple[str, ...] = ()
    opener: Opener
    if pretrained is not None:
        checkpoint = Checkpoint.at(pretrained, config.checkpoint.verify_checkpoint, context)
        path, saved = str(checkpoint.folder), checkpoint.model
        free = FREE_MODEL_FIELDS | OF_THE_HEAD | free_to_begin(saved, True)
        check_model(config.model, vocab_size, saved, checkpoint.folder, free)

        def opened() -> AbstractContextManager[Source]:
            return checkpoint

        opener = opened
        labels = saved.sections.get("finetune", {}).get("labels") or ()
        same = _same_classes(saved.settings, tuple(labels), config)
        without = () if same else ("classifier.",)
    elif hugging_face is not None:
        path, folder = hugging_face, config.data.object_cache.model_folder(hugging_face, weights=True)
        opener = partial(HFReader.for_model, folder, config.model, vocab_size, OF_THE_HEAD | SPARSE_FIELDS)
        descriptions: list[Description] = []
        together(context, lambda: descriptions.append(Description.read(Path(folder))), f"open {path}")
        (description,) = descriptions
        same = _same_classes(description.model, description.labels, config)
        without = () if same else ("classifier.",)
    elif config.finetune.epochs == 0:
        raise CheckpointError(
            "`pretrained_checkpoint` or `load` must name a fine-tuned model to evaluate, but neither is set; "
            "add one"
        )
    else:
        return ("training from scratch: neither `pretrained_checkpoint` nor `load_hf` is set",)
    fresh, unused = take_weights(
        engine, context, path, opener, own=OWN, spare=PRETRAINING_ONLY, without=without
    )
    if config.finetune.epochs == 0 and any(name.startswith("classifier.") for name in fresh):
        raise CheckpointError(
            f"`{path}` must hold a classifier for these labels to be evaluated, but has none; fine-tune "
            "it first"
        )
    remarks = [f"took the pretrained weights from {path}"]
    remarks += [f"initialized anew: {', '.join(fresh)}"] if fresh else []
    remarks += [f"left over there: {', '.join(unused)}"] if unused else []
    return tuple(remarks)


def _same_classes(model: ModelConfig, labels: tuple[str, ...], config: Config) -> bool:
    """Whether a classifier with these labels has the same classes as the configured one.

    A multiple-choice classifier has one row for all choices, and may have no labels.
    """
    ours, unnamed = config.model, model.num_classes == 1 and len(labels) < 2
    alike = (model.num_classes, model.classifier_bias) == (ours.num_classes, ours.classifier_bias)
    return alike and (unnamed or labels == config.finetune.labels)
