"""Converts between megazero's checkpoints and Hugging Face folders, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megazero.checkpoint.box import Box
from megazero.checkpoint.described import check_saved_model
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import saved_iterations
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.manifest import STATE
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.writer import SHARD_BYTES, later_weights, write_checkpoint
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, DataError
from megazero.formats.hf.approximation import Approximation
from megazero.formats.hf.architectures import DECODERS, SCORERS
from megazero.formats.hf.config_json import Description, TokenIds, objections
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.tokenizer_files import tokenizer_files, tokenizer_settings
from megazero.formats.hf.writer import Exported, ModelFiles, write_hf
from megazero.storage.cached import Cache

KIND = "weights"
"""The kind of a checkpoint with weights alone, from which no run can resume."""


@dataclass(frozen=True)
class Imported:
    """The checkpoint that was written from a Hugging Face model.

    Attributes:
        folder: the checkpoint.
        description: the model in transformers.
        tensors, parameters: their numbers.
        tokenizer: the settings of its tokenizer; unset if it came without one.
        remarks: the tensors that were left out, in words.
    """

    folder: Path
    description: Description
    tensors: int
    parameters: int
    tokenizer: TokenizerConfig
    remarks: tuple[str, ...] = ()


def convert_from_hf(hf_dir: str | Path, out_dir: str | Path, *, disk: Disk | None = None) -> Imported:
    """Write the weights of a local Hugging Face model as checkpoint 0 in `out_dir`, in fp32.

    The tokenizer is not copied; the checkpoint records its path.

    Raises:
        CheckpointError: the model is not supported, its files are damaged, or `out_dir` holds checkpoints or
            cannot be written.
    """
    if saved_iterations(out_dir):
        raise CheckpointError(f"`{out_dir}` must hold no checkpoints, but holds some; name another folder")
    with HFReader(Cache().model_folder(str(hf_dir), weights=True)) as reader:
        description, facts = reader.description, facts_of(reader)
        tokenizer = TokenizerConfig.model_validate(facts["tokenizer"])
        folder = write_checkpoint(out_dir, 0, later_weights(reader), facts, disk=disk)
        parameters = sum(Box.whole(shape).numel for shape in reader.shapes.values())
        return Imported(folder, description, len(reader.shapes), parameters, tokenizer, reader.remarks)


def facts_of(reader: HFReader, tokenizer: TokenizerConfig | None = None) -> dict[str, object]:
    """The facts of a checkpoint of a Hugging Face model; the tokenizer is the folder's by default."""
    description = reader.description
    tokenizer = tokenizer or TokenizerConfig(**tokenizer_settings(reader.folder, description.vocab_size))
    few_bits = {} if description.compression is None else {"weight_bits": description.compression.bits}
    return {
        "kind": KIND,
        **few_bits,
        "converted_from": {"architecture": description.architecture.name, "dtype": description.dtype},
        "model": {**description.model.model_dump(mode="json"), "vocab_size": description.vocab_size},
        "vocab_size": description.vocab_size,
        "tokenizer": tokenizer.model_dump(mode="json"),
        "token_ids": asdict(description.tokens),
        "finetune": {"labels": list(description.labels)},
    }


def convert_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = SHARD_BYTES,
    tokenizer: TokenizerConfig | None = None,
    architecture: str | None = None,
    approximations: Iterable[Approximation] = (),
    card: Callable[[CheckpointReader, Exported, bool], str] | None = None,
    disk: Disk | None = None,
) -> tuple[Exported, str | None]:
    """Write a checkpoint as a folder that transformers reads.

    Args:
        checkpoint: one checkpoint, or a run's folder, whose newest checkpoint is taken.
        out: a folder that does not exist yet, or is empty.
        dtype: the dtype of the tensors.
        max_shard_bytes: the size at which another file is begun.
        tokenizer: settings to use instead of the run's.
        architecture: the class in transformers; by default the one that the model was converted from, or the
            first one that can express it.
        approximations: changes of the model that are allowed.
        card: makes the text of README.md, given the checkpoint, what is written, and whether a tokenizer is;
            None writes no such file.
        disk: writes the files.

    Returns:
        The folder, and the reason why no tokenizer was written; None if one was.

    Raises:
        CheckpointError: the checkpoint is missing, is damaged, or has a model that transformers does not
            support; see also `write_hf`.
        ConfigError: there is nothing to approximate.
        DataError: the tokenizer's files are missing or unsuitable.
    """
    reader = CheckpointReader(one_checkpoint(checkpoint))
    facts = ModelFacts.of(reader.facts, reader.folder, reader.folder.parent)
    check_saved_model(facts.model, facts.vocab_size, reader.shapes, reader.folder / STATE)
    section = tokenizer or facts.tokenizer
    model = facts.model
    for approximation in approximations:
        model = approximation.of(model, reader.folder)
    extras, remark = facts.extras(model, section, reader.folder, architecture)
    if card is not None:
        extras = replace(extras, card=lambda exported: card(reader, exported, remark is None))
    with reader:
        exported = write_hf(
            reader,
            model,
            facts.vocab_size,
            out,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            extras=extras,
            disk=disk,
        )
    return exported, remark


@dataclass(frozen=True)
class ModelFacts:
    """The model of a checkpoint, saved by a run or converted, by its facts.

    Attributes:
        model, vocab_size: the model, and the entries of its vocabulary, without padding.
        tokenizer: the settings of its tokenizer.
        tokens: its special tokens; None leaves them to the tokenizer.
        labels: the names of its classes.
        converted_from: the architecture that the weights were converted from.
    """

    model: ModelConfig
    vocab_size: int
    tokenizer: TokenizerConfig
    tokens: TokenIds | None
    labels: tuple[str, ...]
    converted_from: str | None

    @classmethod
    def of(cls, facts: Mapping[str, Any], *folders: Path) -> ModelFacts:
        """Read facts.

        Args:
            folders: where the tokenizer's files may be, if not where they were. The first one is named in
                messages.

        Raises:
            CheckpointError: they do not describe a model.
        """
        where = folders[0]
        try:
            sections = facts.get("config") or facts
            model = ModelConfig.model_validate(sections["model"])
            tokenizer = TokenizerConfig.model_validate(sections.get("tokenizer") or {}).located(*folders)
            vocab_size = int(facts["vocab_size"])
            labels = tuple(map(str, (sections.get("finetune") or {}).get("labels") or ()))
            stored = facts.get("token_ids")
            tokens = None
            if stored is not None:
                tokens = TokenIds.of_json({f"{role}_token_id": value for role, value in stored.items()})
        except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
            raise CheckpointError(
                f"`{where}` must say which model it is of, but its facts do not: {error!r:.300}"
            ) from error
        if labels and model.num_classes not in (1, len(labels)):
            raise CheckpointError(
                f"`{where}` must name as many classes as it has, but names {len(labels)}, and "
                f"`num_classes` is {model.num_classes}"
            )
        origin = facts.get("converted_from")
        converted_from = origin.get("architecture") if isinstance(origin, dict) else None
        return cls(model, vocab_size, tokenizer, tokens, labels, converted_from)

    def extras(
        self, model: ModelConfig, section: TokenizerConfig, where: Path, architecture: str | None = None
    ) -> tuple[ModelFiles, str | None]:
        """The files of a folder of `model` besides weights, and the reason why it has no tokenizer.

        Args:
            section: the settings of the tokenizer.
            where: the folder that is named in messages.
            architecture: the class in transformers; by default the one that the weights were converted from,
                if it can still express `model`.

        Raises:
            DataError: the tokenizer's files are missing or unsuitable.
        """
        try:
            files = tokenizer_files(section, self.model.vocab_size, self.model.positions)
        except DataError as error:
            raise DataError(
                f"the tokenizer of `{where}` must be where it was, or in {where.parent}, but "
                f"{error} Or name another with `--tokenizer-type`, or leave it out with `--no-tokenizer`"
            ) from error
        kinds = {known.model_type for known in DECODERS if known.name == self.converted_from}
        origins = [known for known in (*DECODERS, *SCORERS) if known.model_type in kinds]
        origin = next((known.name for known in origins if not objections(known, model)), None)
        chosen = architecture or origin
        return ModelFiles(self.tokens or files.tokens, files.files, self.labels, chosen), files.remark
