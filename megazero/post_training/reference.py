"""The reference of preferences: the initial weights' log-probabilities of all answers, computed once.

They are kept beside the data, in a file whose name is a hash of weights and data, whatever the layout. So a
training costs two rows a pair and no second model, and the reference cannot drift with what is trained.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.part import Part
from megazero.checkpoint.saver import together
from megazero.checkpoint.shards import parts_to_write
from megazero.data.labelled.dataset import digest_of
from megazero.data.preferences.dataset import PairSamples
from megazero.errors import CheckpointError
from megazero.mpu.context import ParallelContext
from megazero.train.resume.resume import Resumed
from megazero.train.step.engine import Engine

_SLICE = 1 << 22  # elements that are hashed at once
_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Reference:
    """The reference of a training.

    Attributes:
        context: the ranks, of which the first reads and writes files.
        weights: the digest of the weights, as computed with.
        begins: whether the engine still has these weights.
        folder: where files are; None for beside the data.
    """

    context: ParallelContext
    weights: str
    begins: bool
    folder: str | None

    @classmethod
    def of(cls, resumed: Resumed) -> Reference:
        """The reference of a training that begins, or that of the checkpoint; every rank calls this.

        Raises:
            CheckpointError: the checkpoint is of a training without a reference.
        """
        engine, run, config = resumed.engine, resumed.run, resumed.config
        weights = weights_digest(engine, config.precision.dtype) if run is None else run.task.get("reference")
        if weights is None:
            raise CheckpointError(
                "`load` must hold a training on preferences with a reference, but holds another; add "
                "--finetune to begin one with its weights"
            )
        return cls(engine.context, weights, run is None, config.data.data_cache_path)

    def path(self, samples: PairSamples, data: str) -> Path:
        """The file with the scores of the samples of the file `data`, and of those after it."""
        key = hashlib.blake2b(f"{self.weights} {digest_of(samples)}".encode(), digest_size=8).hexdigest()
        place = Path(data)
        return Path(self.folder or place.parent) / f"{place.name}.reference-{key}.npz"

    def scores(
        self, samples: PairSamples, data: str, compute: Callable[[], np.ndarray], say: Callable[[str], None]
    ) -> np.ndarray:
        """The log-probabilities of all answers, float32 [n, 2]; every rank calls this.

        Args:
            samples: the pairs.
            data: their first file.
            compute: scores them with the engine's weights.
            say: receives a remark.

        Raises:
            CheckpointError: on every rank: the file has scores of other answers, or cannot be written; or
                it is gone and the weights are no longer the reference's.
        """
        path = self.path(samples, data)
        first = self.context.rank == 0
        read = together(
            self.context, (lambda: _read(path, samples, self.begins)) if first else None, f"read {path}"
        )
        if read is not None:
            say(f"took the reference's scores from {path}")
            return np.array(read, dtype=np.float32).reshape(-1, 2)
        scores = compute()
        hint = f"write {path} (`--data-cache-path` names another folder)"
        together(self.context, (lambda: _write(path, samples, scores)) if first else None, hint)
        say(f"wrote the reference's scores of {len(scores):,} pairs to {path}")
        return scores


def sums_of(outputs: Iterable[np.ndarray], samples: PairSamples) -> np.ndarray:
    """The log-probability of each answer, float32 [n, 2], from those of tokens in global batches."""
    sums, first = np.zeros((len(samples), 2), np.float32), 0
    for logs in outputs:
        count = min(len(logs), len(samples) - first)
        arrays = samples.batch(range(first, first + count))
        begins, ends = (arrays[name][..., None] - 1 for name in ("answers", "lengths"))
        places = np.arange(logs.shape[-1])
        counted = (places >= begins) & (places < ends)
        sums[first : first + count] = logs[:count].sum(-1, dtype=np.float64, where=counted)
        first += count
    return sums


def weights_digest(engine: Engine, dtype: str) -> str:
    """A digest of the weights that is the same on every layout, and of the dtype; every rank calls this.

    It is the sum over all elements of a hash of value, place and name, which ranks compute for their own.
    """
    context = engine.context
    total = torch.zeros(1, dtype=torch.int64, device=context.device)
    for part in parts_to_write(engine.optimizer, context, moments=False):
        total += _hashed(part).to(context.device)
    context.world.all_reduce(total).wait()
    return f"{int(total) & (1 << 64) - 1:016x}-{dtype}"


def _hashed(part: Part) -> Tensor:
    """The sum of the hashes of a part's elements, int64 [1] modulo 2^64."""
    name = hashlib.blake2b(str(part.key).encode(), digest_size=8).digest()
    tensor = part.tensor.detach()
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    strides = [int(np.prod(part.shape[dim + 1 :])) for dim in range(len(part.shape))]
    # By slices of the first dim, as hashes are twice as wide as weights.
    rows = max(1, _SLICE * tensor.shape[0] // max(1, tensor.numel())) if tensor.dim() else 1
    for start in range(0, tensor.shape[0] if tensor.dim() else 1, rows):
        piece = tensor[start : start + rows] if tensor.dim() else tensor
        mixed = piece.float().contiguous().view(torch.int32).long() + int.from_bytes(name, "big", signed=True)
        for dim, stride in enumerate(strides):
            first = part.box.offset[dim] + (start if dim == 0 else 0)
            place = torch.arange(first, first + piece.shape[dim], device=tensor.device) * stride
            mixed += _wrapped(_MIXERS[0]) * place.view(-1, *[1] * (piece.dim() - dim - 1))
        for shift, mixer in zip((30, 27), _MIXERS[1:], strict=True):
            mixed = (mixed ^ (mixed >> shift)) * _wrapped(mixer)
        total += (mixed ^ (mixed >> 31)).sum()
    return total


def _wrapped(number: int) -> int:
    """An unsigned number of 64 bits as a signed one with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _lengths(samples: PairSamples) -> np.ndarray:
    """The number of tokens of each answer, int64 [n, 2]."""
    pairs = samples.pairs
    lengths: np.ndarray = np.diff(pairs.offsets) - pairs.answers
    return lengths.reshape(-1, 2)


def _read(path: Path, samples: PairSamples, begins: bool) -> list[float] | None:
    """The scores in a file, as a list; None without a file in a training that begins."""
    if not path.exists():
        if begins:
            return None
        raise CheckpointError(
            f"`{path}` must hold the reference's scores, since the weights have changed after them, but is "
            "gone; put it back, or begin anew in another folder"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            scores, lengths = file["scores"], file["lengths"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"`{path}` must hold the reference's scores, but is damaged ({error}); remove it, and a training "
            "that begins writes it anew"
        ) from error
    if scores.dtype != np.float32 or not np.array_equal(lengths, _lengths(samples)):
        raise CheckpointError(
            f"`{path}` must hold scores of these answers, but those that it has are of other lengths; remove "
            "it, and a training that begins writes it anew"
        )
    listed: list[float] = scores.ravel().tolist()
    return listed


def _write(path: Path, samples: PairSamples, scores: np.ndarray) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, scores=scores, lengths=_lengths(samples))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
