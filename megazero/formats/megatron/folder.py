"""The files of a checkpoint of Megatron-LM or Megatron-DeepSpeed, by name; only text files are opened here.

There are five forms, with pipeline stage PPP, tensor-parallel rank TT and expert-parallel rank EEE in names::

    iter_0000100/.metadata, common.pt, *.distcp         Megatron-LM, format ``torch_dist``
    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt  Megatron-LM (``release/`` for converted weights)
    global_step100/mp_rank_TT_model_states.pt           Megatron-DeepSpeed without a pipeline
    global_step100/layer_LL-model_TT-model_states.pt    Megatron-DeepSpeed with one: a file per layer
    global_step100_universal/zero/NAME/fp32.pt          either, converted to DeepSpeed's universal form
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from megazero.errors import CheckpointError
from megazero.formats.deepspeed.files import UNIVERSAL

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_RANK_FILE = re.compile(r"mp_rank_(\d{2,})_model_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d{2,})(?:-model_(\d{2,}))?-model_states\.pt")
_RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")


class CheckpointForm(Enum):
    """The form of a checkpoint; see the module."""

    MEGATRON = "Megatron-LM"
    DISTRIBUTED = "Megatron-LM, torch_dist"
    DEEPSPEED = "Megatron-DeepSpeed"
    LAYERS = "Megatron-DeepSpeed, a file per layer"
    UNIVERSAL = "Megatron-DeepSpeed, universal"


@dataclass(frozen=True)
class MegatronFiles:
    """The files of one checkpoint.

    Attributes:
        folder: the folder of the files.
        form: the form.
        stages: for each part of the model (a pipeline stage or a layer), in order, the files by
            tensor-parallel rank.
        ranks: the files with iteration and arguments.
        experts: file of a rank -> the files of the further expert-parallel ranks, which have more experts.
    """

    folder: Path
    form: CheckpointForm
    stages: tuple[tuple[Path, ...], ...]
    ranks: tuple[Path, ...]
    experts: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def by_experts(self) -> MegatronFiles:
        """The same files of one pipeline stage, with the second number in names read as the expert rank."""
        first, *others = self.stages
        further = {path: tuple(stage[rank] for stage in others) for rank, path in enumerate(first)}
        return replace(self, stages=(first,), experts=further)

    @property
    def tensor_ranks(self) -> int:
        """The tensor-parallel size."""
        return len(self.stages[0])


def find_files(source: Path) -> MegatronFiles:
    """Find the files of the checkpoint in a folder, or of the newest one in a run's folder.

    Raises:
        CheckpointError: there is no checkpoint, its form is not supported, or files are missing.
    """
    try:
        folder = _checkpoint_folder(source)
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"`{source}` must be a readable folder, but is not: {error}") from error
    _refuse_other_forms(folder, names)
    if ".metadata" in names and not any(map(_RANK_FOLDER.fullmatch, names)):
        common = folder / "common.pt"
        return MegatronFiles(folder, CheckpointForm.DISTRIBUTED, ((common,),), (common,))
    if (folder / UNIVERSAL).is_dir():
        files = _rank_files(folder, names)
        if not files:
            raise CheckpointError(
                f"`{folder}` must hold mp_rank_*_model_states.pt beside `{UNIVERSAL}`, but does not; copy "
                f"all files"
            )
        return MegatronFiles(folder, CheckpointForm.UNIVERSAL, (files[:1],), files)
    layers = {n: match for n in names if (match := _LAYER_FILE.fullmatch(n))}
    if layers:
        places = {(int(m[2] or 0), int(m[1])): folder / n for n, m in layers.items()}
        return MegatronFiles(folder, CheckpointForm.LAYERS, _grid(folder, places), _rank_files(folder, names))
    files = _rank_files(folder, names)
    if files:
        return MegatronFiles(folder, CheckpointForm.DEEPSPEED, (files,), files)
    listed = list(_megatron_ranks(folder, names))
    ranks = dict(listed)
    if len(ranks) < len(listed):
        raise CheckpointError(
            f"`{folder}` must hold one file for each rank, but has two for some; keep one checkpoint"
        )
    stages = _grid(folder, {(tp, pp): path for (tp, pp, ep), path in ranks.items() if not ep})
    experts: dict[Path, tuple[Path, ...]] = defaultdict(tuple)
    for tp, pp, ep in sorted(rank for rank in ranks if rank[2]):
        if (tp, pp, 0) not in ranks:
            raise CheckpointError(
                f"`{folder}` must have the file of the first expert-parallel rank of rank {tp}, stage {pp}, "
                f"but lacks it; copy all"
            )
        experts[ranks[tp, pp, 0]] += (ranks[tp, pp, ep],)
    return MegatronFiles(
        folder, CheckpointForm.MEGATRON, stages, tuple(ranks[rank] for rank in sorted(ranks)), experts
    )


def _checkpoint_folder(source: Path) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"`{source}` must be a folder of Megatron checkpoints; check the path")
    if is_checkpoint(source):
        return source
    for tracker in _TRACKERS:
        path = source / tracker
        if not path.is_file():
            continue
        named = path.read_text(errors="replace").strip()
        if not re.fullmatch(r"\w{1,80}", named):
            raise CheckpointError(f"`{path}` must name a checkpoint, but holds {named[:40]!r}; correct it")
        folders = [named]
        if named.isdecimal():
            folders = [f"iter_{int(named):07d}", f"global_step{int(named)}"]
        for folder in folders:
            if (source / folder).is_dir() and is_checkpoint(source / folder):
                return source / folder
        raise CheckpointError(
            f"`{path}` names {named}, but {source} has no checkpoint {' or '.join(folders)}; name its folder"
        )
    raise CheckpointError(
        f"`{source}` must hold one of {', '.join(_TRACKERS)}, or be a checkpoint with files mp_rank_*, but "
        f"has none; name the folder of a run or of one of its checkpoints"
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has files of one checkpoint of Megatron, by their names."""
    return any(
        entry.name.startswith(("mp_rank_", "layer_", "zero_pp_rank_")) or entry.name == ".metadata"
        for entry in folder.iterdir()
    )


def _refuse_other_forms(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if "expert_" in name:
            raise CheckpointError(
                f"`{folder}` must hold experts as Megatron-LM does, but holds them as DeepSpeed does "
                f"({name}); convert it with DeepSpeed's tools"
            )
        if re.fullmatch(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", name):
            raise CheckpointError(
                f"`{folder}` must hold whole weights, but was saved under ZeRO stage 3 ({name}); load it "
                f"with DeepSpeed and save it under stage 1"
            )


def _rank_files(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """DeepSpeed's model files, one per model-parallel rank (stage x tensor ranks + tensor rank)."""
    places = {(int(m[1]), 0): folder / n for n in names if (m := _RANK_FILE.fullmatch(n))}
    return _grid(folder, places)[0] if places else ()


def _megatron_ranks(folder: Path, names: Iterable[str]) -> Iterable[tuple[tuple[int, int, int], Path]]:
    for name in names:
        paths = (folder / name / file for file in _RANK_FILES)
        if (match := _RANK_FOLDER.fullmatch(name)) and (path := next(filter(Path.is_file, paths), None)):
            yield (int(match[1]), int(match[2] or 0), int(match[3] or 0)), path


def _grid(folder: Path, places: Mapping[tuple[int, int], Path]) -> tuple[tuple[Path, ...], ...]:
    """Turn files by (tensor-parallel rank, stage) into stages of ranks; stage numbers may have gaps.

    Raises:
        CheckpointError: there are no files, or one is missing.
    """
    if not places:
        raise CheckpointError(
            f"`{folder}` must hold files mp_rank_*/model_optim_rng.pt, mp_rank_*_model_states.pt or "
            f"layer_*-model_states.pt, but has none; name the folder of a checkpoint"
        )
    stages: dict[int, dict[int, Path]] = defaultdict(dict)
    for (rank, stage), path in places.items():
        stages[stage][rank] = path
    ranks = 1 + max(rank for rank, _ in places)
    missing = [f"rank {r} of {s}" for s in sorted(stages) for r in range(ranks) if r not in stages[s]]
    if missing:
        raise CheckpointError(
            f"`{folder}` must have a file for each of {ranks} tensor-parallel ranks in each stage or layer, "
            f"but lacks {', '.join(missing[:8])}; copy all files"
        )
    return tuple(tuple(stages[s][r] for r in range(ranks)) for s in sorted(stages))
