"""Small checkpoints: of known content, saved by ranks as threads, and of a real training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.blocks import BlockHasher
from megazero.checkpoint.box import Box
from megazero.checkpoint.manifest import dump_manifest
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.saver import Saver
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld

UP, EMBEDDING = Key("layers.0.mlp.up.weight"), Key("embedding.weight")
TENSORS = {
    UP: torch.arange(12.0).view(4, 3),
    EMBEDDING: torch.full((2, 5), -0.5),
    Key(UP.name, "exp_avg"): torch.ones(4, 3),
}
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 4 --eval-iters 0 --log-interval 4 "
    "--save-interval 2"
)


def facts_of(iteration: int, ranks: int) -> dict[str, Any]:
    """As a training of two tensor-parallel slices writes them, but shorter."""
    return {
        "kind": "pretraining",
        "vocab_size": 2,
        "written_by": {"world_size": ranks, "megazero": "0.1.0", "git": "abc", "torch": "2.13.0"},
        "time": "2026-01-02T03:04:05Z",
        "config": {
            "model": {"num_layers": 1, "hidden_size": 3, "kv_channels": None},
            "parallel": {
                "tensor_model_parallel_size": ranks,
                "pipeline_model_parallel_size": 1,
                "context_parallel_size": 1,
            },
            "zero": {"stage": 1},
            "precision": {"dtype": "bf16"},
        },
        "state": {
            "iteration": iteration,
            "consumed_samples": 8 * iteration,
            "consumed_tokens": 1024 * iteration,
            "skipped": 0,
        },
        "scaler": {"scale": 1.0},
        "updates": iteration,
    }


def save(
    directory: Path,
    iteration: int = 1,
    ranks: int = 1,
    tensors: Mapping[Key, Tensor] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Save tensors, of which each rank writes as many rows; returns the checkpoint's folder."""
    tensors = TENSORS if tensors is None else tensors
    facts = facts_of(iteration, ranks) if facts is None else facts
    world = ThreadWorld(ranks)

    def work(rank: int) -> None:
        saver = Saver(directory, thread_context(world, ProcessGrid(pp=1, dp=1, tp=ranks), rank))
        saver.save(iteration, [_rows(key, tensor, rank, ranks) for key, tensor in tensors.items()], facts)
        saver.close()

    world.run(work)
    return directory / f"iter_{iteration:07d}"


def _rows(key: Key, tensor: Tensor, rank: int, ranks: int) -> Part:
    rows = tensor.shape[0] // ranks
    box = Box((rank * rows, *[0] * (tensor.dim() - 1)), (rows, *tensor.shape[1:]))
    return Part(key, tuple(tensor.shape), box, tensor[box.slices])


def flip(path: Path, *positions: int) -> None:
    """Change single bytes of a file."""
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 1
    path.write_bytes(data)


def describe_anew(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index, and write the manifest that fits what is there then: as one who means harm would."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    records = {}
    for path in folder.iterdir():
        if path.name != "manifest.json":
            hasher = BlockHasher()
            hasher.update(path.read_bytes())
            records[path.name] = hasher.record()
    iteration = int(folder.name.removeprefix("iter_"))
    (folder / "manifest.json").write_bytes(dump_manifest(iteration, records))
