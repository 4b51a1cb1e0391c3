"""`FolderAtEnd`: a training's weights as a folder for transformers, written by all ranks of a live model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.part import Part
from megazero.checkpoint.saver import together
from megazero.config.tree.config import Config
from megazero.formats.hf.config_json import architecture_of
from megazero.formats.hf.convert import ModelFacts
from megazero.formats.hf.stream import GatheredSource, WeightStream
from megazero.formats.hf.writer import DTYPES, FolderFiles, check_new, write_stream
from megazero.mpu.context import ParallelContext


@dataclass(frozen=True)
class FolderAtEnd:
    """The folder of `--save-hf`, checked before training and written after it.

    Attributes:
        out: the folder.
        facts: what is known of the model.
        described: its small files.
    """

    out: Path
    facts: ModelFacts
    described: FolderFiles

    @classmethod
    def of(
        cls, config: Config, vocab_size: int, facts: Mapping[str, object], context: ParallelContext
    ) -> FolderAtEnd | None:
        """Make the folder that a run asks for; None without one. Every rank calls this.

        Args:
            facts: the task's facts, as in its checkpoints.

        Raises:
            CheckpointError: on every rank: it is not empty, or transformers does not support the model.
            DataError: the tokenizer's files are missing.
        """
        section = config.checkpoint
        if section.save_hf is None:
            return None
        out = Path(section.save_hf).absolute()
        together(context, partial(check_new, out) if context.rank == 0 else None, f"write {out}")
        described = {**facts, "config": config.model_dump(mode="json"), "vocab_size": vocab_size}
        known = ModelFacts.of(described, out)
        extras, _ = known.extras(known.model, known.tokenizer, out)
        architecture = architecture_of(known.model, extras.architecture)
        dtype = DTYPES[section.save_hf_dtype]
        return cls(out, known, FolderFiles.of(architecture, known.model, vocab_size, dtype, extras))

    def stream(self, parts: Iterable[Part], context: ParallelContext, version: int) -> WeightStream:
        """The weights as a stream, gathered by the first rank; every rank calls this.

        Args:
            parts: what this rank has of them.
            version: the iteration.

        Raises:
            CheckpointError: the weights are not those of the model.
        """
        source, model, vocab_size = GatheredSource(parts, context), self.facts.model, self.facts.vocab_size
        described = self.described
        return WeightStream.of_model(
            source, described.architecture, model, vocab_size, dtype=described.dtype, version=version
        )

    def write(
        self, parts: Iterable[Part], context: ParallelContext, version: int, disk: Disk | None = None
    ) -> None:
        """Write the folder, which appears whole; every rank calls this. For arguments, see `stream`.

        Raises:
            CheckpointError: on every rank: it cannot be written; nothing is left then.
        """
        stream = self.stream(parts, context, version)

        def work() -> None:
            try:
                if stream.yields:
                    write_stream(stream, self.described, self.out, disk=disk)
            finally:
                stream.finish()

        together(context, work, f"write {self.out}")
