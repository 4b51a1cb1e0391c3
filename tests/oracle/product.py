"""Runs the product as pretrain_gpt.py does, and hands over what the oracle takes as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.moe.hashed import expert_table
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.rng import sample_keys, site_key
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.counter_random import derive
from megazero.ops.dropout import AttentionDropout, Dropout, dropout_mask_attention, dropout_mask_hidden
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.pretraining import pretrain, pretrain_on

Flags = Mapping[str, object]
# Flags that say over how many ranks a model is trained, and how.
_LAYOUT = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "sequence-parallel",
    "zero-stage",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "moe-token-dispatcher-type",
)


def write_datasets(folder: Path, datasets: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Write each dataset's documents under its name."""
    for name, documents in datasets.items():
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for document in documents:
                writer.add_document([np.array(document)])


def arrays_of(flags: Flags, data: Path, count: int) -> dict[str, np.ndarray]:
    """The first samples that a model trains on, stacked."""
    config = parse_config(argv_of(_serial(flags), data), world_size=1).config
    train, _, _ = family_of(config.model).samples.datasets(config, build_vocabulary(config), (count, 0, 0))
    return train.batch(range(count))


def _serial(flags: Flags) -> dict[str, object]:
    return {name: value for name, value in flags.items() if name not in _LAYOUT}


def argv_of(flags: Flags, data: Path) -> list[str]:
    """The command line of these flags, with the datasets of `data`."""
    argv = []
    for name, value in flags.items():
        if name == "data-path":
            value = [str(data / each) if isinstance(each, str) else str(each) for each in value]
        elif isinstance(value, bool):
            value = [] if value else None
        elif not isinstance(value, tuple):
            value = [value]
        if value is not None:
            argv += [f"--{name}", *map(str, value)]
    return argv


def initial_weights(flags: Flags, data: Path) -> dict[str, Tensor]:
    """The weights that a single process starts from, by name."""
    config, context = parse_config(argv_of(_serial(flags), data), world_size=1).config, solo_context()
    chunks = build_chunks(config, build_vocabulary(config), context)
    engine = build_engine(config, training_plan_of(config, 1), chunks, context)
    weights = ((spec, state["weight"]) for spec, state in engine.optimizer.full_state(("weight",)))
    return {spec.name: spec.unshard(weight, context.groups).clone() for spec, weight in weights}


def kept(seed: int, place: str, samples: Sequence[int], share: float, shape: tuple[int, ...]) -> Tensor:
    """Which elements dropout keeps: [b, s, h] after a layer, [b, heads, s, s] of attention."""
    keys = torch.from_numpy(sample_keys(seed, samples))
    kind, *rest = place.split()
    if kind == "attention" and rest[0] != "out":
        rows = range(shape[2])
        dropout = AttentionDropout(share, derive(site_key("attention", int(rest[0])), keys), rows, rows)
        return dropout_mask_attention(dropout, *shape)
    site = ("embedding", *map(int, rest)) if kind == "embedding" else (int(rest[1]), f"{kind}_out")
    b, s, h = shape
    dropout = Dropout(share, derive(site_key("hidden", *site), keys), range(s))
    return dropout_mask_hidden(dropout, s, b, h).transpose(0, 1)


def tables(flags: Flags) -> dict[int, Tensor]:
    """Which experts each id has, [ids, k], in the layers whose tokens find theirs by it."""
    experts, choices = flags["num-experts"][0], flags["moe-router-topk"]
    ids = flags["vocab-size"] + 1  # and the end of a document
    layers = range(flags.get("moe-n-hash-layers", 0))
    return {n: expert_table(n, experts, choices, ids, torch.device("cpu")) for n in layers}


def train(flags: Flags, data: Path, out: Path, ranks: int) -> tuple[list[dict], dict[str, dict[str, Tensor]]]:
    """Train on so many ranks: the metrics of each step, and the last checkpoint: name -> kind -> tensor."""
    metrics, saved = out / "metrics.jsonl", out / "checkpoints"
    argv = [*argv_of(flags, data), "--metrics-jsonl", str(metrics), "--save", str(saved)]
    config = parse_config(argv, world_size=ranks).config
    if ranks == 1:
        state = pretrain(config, Launch())
    else:
        world = ThreadWorld(ranks)
        tp = flags.get("tensor-model-parallel-size", 1)
        pp = flags.get("pipeline-model-parallel-size", 1)
        ep, etp = flags.get("expert-model-parallel-size", 1), flags.get("expert-tensor-parallel-size", 0)
        grid = ProcessGrid(pp=pp, tp=tp, dp=ranks // (tp * pp), ep=ep, etp=etp)
        context_of = partial(thread_context, world, grid)
        state = world.run(lambda rank: pretrain_on(config, context_of(rank)))[0]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    tensors: dict[str, dict[str, Tensor]] = {}
    with CheckpointReader(iteration_folder(saved, state.iteration)) as reader:
        for key in reader.shapes:
            tensors.setdefault(key.name, {})[key.kind] = reader.tensor(key)
    return records, tensors
