"""The files of a DeepSpeed checkpoint, by name. Each checkpoint is a folder, called its tag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megazero.errors import DamagedCheckpointError

MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
MODEL_FILE_SUFFIX = "_model_states.pt"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
UNIVERSAL = "zero"
"""The folder of a universal checkpoint beside its model files."""

# Old releases wrote no underline before `optim_states`.
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:(?:bf16_)?zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<model>\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")


@dataclass(frozen=True)
class TagFiles:
    """The files of one tag.

    Attributes:
        folder: the folder of the tag.
        model: model files by (model-parallel rank, data-parallel rank).
        optimizer: optimizer files, likewise.
        layers: a pipeline's layer files by the number of the layer.
        experts: files of experts.
    """

    folder: Path
    model: Mapping[tuple[int, int], Path]
    optimizer: Mapping[tuple[int, int], Path]
    layers: Mapping[int, Path]
    experts: Sequence[Path]

    @property
    def universal(self) -> bool:
        """Whether it is a universal checkpoint."""
        return (self.folder / UNIVERSAL).is_dir()

    def model_ranks(self) -> list[int]:
        """The model-parallel ranks with files, in ascending order."""
        return sorted({rank for rank, _ in self.model})

    def of_optimizer(self, model_rank: int, count: int) -> list[Path]:
        """The optimizer files of a model-parallel rank's `count` data-parallel ranks, in order.

        Raises:
            DamagedCheckpointError: a file is missing.
        """
        return self._complete(self.optimizer, model_rank, count, "optim_states.pt")

    def of_model(self, model_rank: int, count: int) -> list[Path]:
        """The model files of a model-parallel rank's `count` data-parallel ranks; see `of_optimizer`."""
        return self._complete(self.model, model_rank, count, "model_states.pt")

    def _complete(
        self, paths: Mapping[tuple[int, int], Path], model_rank: int, count: int, kind: str
    ) -> list[Path]:
        missing = [rank for rank in range(count) if (model_rank, rank) not in paths]
        if missing:
            names = ", ".join(f"zero_pp_rank_{r}_mp_rank_{model_rank:02d}_{kind}" for r in missing[:5])
            raise DamagedCheckpointError(
                f"`{self.folder}` must hold the files of {count} ranks, but {names}"
                f"{' and more' if missing[5:] else ''} {'is' if len(missing) == 1 else 'are'} missing; copy "
                "the files of every node into one folder"
            )
        return [paths[model_rank, rank] for rank in range(count)]


def find_files(folder: Path) -> TagFiles | None:
    """The files in the folder of a tag; None if none is DeepSpeed's."""
    names = sorted(folder.glob("*.pt")) if folder.is_dir() else []
    experts = [path for path in names if _EXPERT.fullmatch(path.name)]
    layers = {int(m["layer"]): path for path, m in _matches(_LAYER, names)}
    model = {(int(m["model"]), int(m["data"] or 0)): path for path, m in _matches(_MODEL, names)}
    optimizer = {(int(m["model"]), int(m["data"])): path for path, m in _matches(_OPTIMIZER, names)}
    if not (model or optimizer or layers):
        return None
    return TagFiles(folder, model, optimizer, layers, experts)


def _matches(pattern: re.Pattern[str], paths: Iterable[Path]) -> Iterable[tuple[Path, re.Match[str]]]:
    return ((path, match) for path in paths if (match := pattern.fullmatch(path.name)))


def inventory(folder: Path, most: int = 5) -> str:
    """The names of the first files in a folder, as a clause for messages."""
    if not folder.is_dir():
        return "nothing, for it does not exist" if not folder.exists() else "nothing, for it is a file"
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if not names:
        return "nothing in it"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The path of a model-parallel rank's model file, given the rank as two digits."""
    return str(Path(base_folder) / f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The path of a rank's optimizer file."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return str(Path(base_folder) / name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The path of a pipeline layer's file for a tensor-parallel rank; `layer_id` is such as ``layer_03``."""
    return str(Path(base_folder) / f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")
