"""A trained model that is read one block at a time: a checkpoint's, or a Hugging Face folder's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.part import Source
from megazero.checkpoint.shards import parts_of_parameters
from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.precision import PrecisionConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.data.blended import SampleDataset
from megazero.errors import ConfigError
from megazero.formats.foreign import open_foreign
from megazero.formats.hf.convert import ModelFacts
from megazero.formats.megatron.reader import ImportOptions
from megazero.models.batch import Batch, TextCollate
from megazero.models.chunk import Part, Slice
from megazero.models.language_model import LanguageModel
from megazero.moe.loads import RouterLoads
from megazero.mpu.context import solo_context
from megazero.quantize.calibrate import Watch
from megazero.spec.model import ModelSpec
from megazero.spec.resolve import model_spec
from megazero.train.parts.chunks import placement_of
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.keepers import Routers
from megazero.train.resume.saved import Checkpoint, SavedModel, read_saved_model

LONGEST = 2048
"""Tokens of a sample, where the model was trained on more and nothing is said."""


@dataclass(frozen=True)
class BlockModel:
    """A language model in fp32, of which one block is in memory at a time.

    Attributes:
        source: its weights.
        saved: what is known of it.
        facts: the same as the checkpoint has it.
        config: its configuration on one rank.
        vocabulary: its vocabulary.
        device: where blocks are built.
    """

    source: Source
    saved: SavedModel
    facts: Mapping[str, Any]
    config: Config
    vocabulary: Vocabulary
    device: torch.device

    @classmethod
    @contextmanager
    def opened(cls, path: str, device: torch.device, length: int | None = None) -> Iterator[BlockModel]:
        """Open a run's newest checkpoint, one checkpoint, or a folder of transformers.

        Args:
            path: the folder.
            device: where blocks are built.
            length: tokens of a sample; by default as trained, but at most `LONGEST`.

        Raises:
            MegazeroError: there is no model, or it does not generate text.
        """
        if foreign := open_foreign(path, ImportOptions()):
            with closing(foreign):
                yield cls._of(foreign, foreign.facts, foreign.folder, device, length)
            return
        with Checkpoint(one_checkpoint(path)) as checkpoint:
            yield cls._of(checkpoint, checkpoint.facts, checkpoint.folder, device, length)

    @classmethod
    def _of(
        cls, source: Source, facts: Mapping[str, Any], folder: Path, device: torch.device, length: int | None
    ) -> BlockModel:
        saved = read_saved_model(facts, folder, source.shapes)
        config = saved.config()
        positions = config.model.positions
        tokens = length or min(config.model.seq_length, LONGEST)
        if not 1 <= tokens <= positions:
            raise ConfigError(f"`--seq-length` must be from 1 to the model's {positions}, but is {tokens}")
        sizes = {"seq_length": tokens, "max_position_embeddings": positions}
        padding = {"make_vocab_size_divisible_by": 1, "pad_vocab_size_to": None}
        config = config.model_copy(
            update={
                "model": config.model.model_copy(update={**sizes, **padding}),
                "parallel": ParallelConfig(),
                "precision": PrecisionConfig(),
                "recompute": RecomputeConfig(),
            }
        )
        size = saved.vocab_size
        vocabulary = replace(build_vocabulary(config), size=size, padded=size)
        return cls(source, saved, facts, config, vocabulary, device)

    @property
    def spec(self) -> ModelSpec:
        """The model, layer by layer."""
        return model_spec(self.config.model)

    @property
    def known(self) -> ModelFacts:
        """The facts that a folder of transformers states."""
        return ModelFacts.of(self.facts, self.saved.place.parent)

    @property
    def dtype(self) -> str:
        """The name of the dtype that the model was trained or stored in, as transformers spells it."""
        origin = self.facts.get("converted_from")
        stored = origin.get("dtype") if isinstance(origin, dict) else None
        trained = {"fp16": "float16", "bf16": "bfloat16"}.get(self.saved.config().precision.dtype)
        return stored if stored in ("float16", "bfloat16") else trained or "float32"

    @property
    def parts(self) -> list[Part]:
        """The blocks in order: the embedding, the layers, the head."""
        blocks = family_of(self.config.model).models.blocks(self.config, self.vocabulary.padded)
        return [block.part for block in blocks]

    def linears(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of linear layers and experts in the layers, by name.

        Raises:
            ConfigError: the model is not one that generates text.
        """
        layers = self._chunk(None, torch.device("meta")).layers
        return {name: tuple(weight.shape) for name, weight in Watch(layers).weights.items()}

    def _chunk(self, parts: tuple[Part, ...] | None, device: torch.device) -> LanguageModel:
        placement = placement_of(self.config.parallel, "fp32", solo_context(device), device)
        sizes = self.vocabulary.size, self.vocabulary.padded
        held = Slice(self.spec, sizes, placement, self.config.recompute, parts)
        chunk = family_of(self.config.model).models.chunk(held)
        if not isinstance(chunk, LanguageModel):
            raise ConfigError(
                f"the model must be a decoder that generates text, but its family is {self.spec.family}; "
                "others are not quantized"
            )
        return chunk

    def block(self, part: Part) -> LanguageModel:
        """Build one block, with its weights."""
        context, chunk = solo_context(self.device), self._chunk((part,), self.device)
        parts = parts_of_parameters(chunk.parameters(), context)
        loads = RouterLoads(chunk.routers(), context, experts=bool(self.config.model.num_experts))
        self.source.read(parts + Routers(loads.state(), context).parts_from(self.source))
        return chunk.eval()

    def samples(
        self, prefix: str, split: str | None, sizes: tuple[int, int]
    ) -> tuple[Samples | None, Samples | None]:
        """The samples of a dataset for calibration and, from the part that is kept aside, for measurement.

        Args:
            prefix: the dataset.
            split: its parts, as `--split`; None for those of the training.
            sizes: the most samples of both.

        Raises:
            DataError: the dataset cannot be read, or is too small.
        """
        data = DataConfig(data_path=(prefix,), split=split or self.config.data.split)
        config = self.config.model_copy(update={"data": data})
        datasets = family_of(config.model).samples.datasets(config, self.vocabulary, (*sizes, 0))
        collate = TextCollate.of(config, self.vocabulary.size, solo_context(self.device), None)
        first, second = (
            None if dataset is None or not size else Samples(dataset, min(size, len(dataset)), collate)
            for dataset, size in zip(datasets[:2], sizes, strict=True)
        )
        return first, second


@dataclass(frozen=True)
class Samples:
    """The first `count` samples of a dataset, in its order."""

    dataset: SampleDataset
    count: int
    collate: TextCollate

    def batches(self, numbers: range) -> list[Batch]:
        """A batch of each of these samples."""
        return [self.collate(self.dataset.batch([number]), (number,)) for number in numbers]
