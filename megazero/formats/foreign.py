"""Folders of Hugging Face and Megatron as weights that a model is loaded from, without a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.manifest import MANIFEST
from megazero.checkpoint.part import Key, Part, Source
from megazero.formats.hf.config_json import CONFIG
from megazero.formats.hf.convert import facts_of as hf_facts
from megazero.formats.hf.reader import HFReader
from megazero.formats.megatron.convert import weight_facts
from megazero.formats.megatron.folder import is_checkpoint
from megazero.formats.megatron.reader import ImportOptions, MegatronReader


@dataclass(frozen=True)
class ForeignModel(Source):
    """The weights of another library, and what their checkpoint of ours would say of the model.

    Attributes:
        source: reads the tensors.
        folder: the folder of the files.
        facts: as in a checkpoint's ``state.json``.
        iteration: the iteration after which they were saved; 0 if unknown.
        remarks: what was left out, in words.
        close: closes the files.
    """

    source: Source
    folder: Path
    facts: Mapping[str, object]
    iteration: int
    remarks: tuple[str, ...]
    close: Callable[[], None]

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """Logical tensor -> its shape."""
        return self.source.shapes

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        self.source.read(parts)


def open_foreign(given: str, options: ImportOptions | None, step: int | None = None) -> ForeignModel | None:
    """Open a folder of Hugging Face or Megatron; None for anything else, such as a run's folder of ours.

    Args:
        given: the folder.
        options: the user's choices; of a Hugging Face folder the tokenizer alone counts.
        step: the iteration to take of a Megatron run; None for the newest.

    Raises:
        ConfigError: Megatron's files are pickles, and `options` do not allow to read them.
        CheckpointError: the folder is damaged, or holds a model that this library lacks.
    """
    options, folder = options or ImportOptions(), Path(given)
    if not folder.is_dir() or next(folder.glob(f"iter_*/{MANIFEST}"), None):
        return None
    if (folder / CONFIG).is_file():
        hf = HFReader(folder)
        return ForeignModel(hf, folder, hf_facts(hf, options.tokenizer), 0, hf.remarks, hf.close)
    names = (
        ("iter_*", "release", "global_step*") if step is None else (f"iter_{step:07d}", f"global_step{step}")
    )
    steps = [inner for name in names for inner in sorted(folder.glob(name)) if inner.is_dir()]
    if is_checkpoint(folder):
        place = folder
    elif not any(map(is_checkpoint, steps)):
        return None
    else:
        place = folder if step is None else steps[0]
    megatron = MegatronReader(place, options)
    facts = weight_facts(megatron, options.tokenizer)
    return ForeignModel(megatron, megatron.files.folder, facts, megatron.iteration or 0, (), megatron.close)
