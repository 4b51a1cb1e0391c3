"""Small trained models, and runs of `quantize` on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.quantize.blocks import BlockModel
from megazero.quantize.job import quantize
from megazero.quantize.recipe import Recipe
from megazero.quantize.report import Report
from megazero.train.pretraining import pretrain

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 64 --lr 1e-2 --micro-batch-size 8 --global-batch-size 8 "
    "--train-iters 40 --eval-iters 0 --log-interval 100 --split 90,10,0 --hidden-dropout 0 "
    "--attention-dropout 0"
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
EXPERTS = f"{LLAMA} --num-query-groups 2 --num-experts 4 --moe-router-topk 2"
SAMPLES = 20  # three strands, the last of them short


def write_text(prefix: Path) -> None:
    """Documents in which the next token follows from the one before, with exceptions."""
    rng = np.random.default_rng(5)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(120):
            steps = np.where(rng.random(24) < 0.8, 3, rng.integers(0, 64, 24))
            writer.add_document([np.cumsum(steps) % 64])


def train(folder: Path, flags: str) -> Path:
    """A run of 40 steps on the text in the folder above."""
    argv = [*SHAPE.split(), *flags.split(), "--data-path", str(folder.parent / "text"), "--save", str(folder)]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return folder


def quantized(load: Path, out: Path, recipe: Recipe, ranks: int = 1, **more: Any) -> Report:
    """The report of a job on this many ranks, which calibrates on the text beside the model."""
    world = ThreadWorld(ranks)

    def work(rank: int) -> Report | None:
        context = thread_context(world, ProcessGrid(dp=ranks), rank)
        with BlockModel.opened(str(load), torch.device("cpu")) as model:
            samples = model.samples(str(load.parent / "text"), "90,10,0", (SAMPLES, 10))
            return quantize(model, recipe, samples, out, context, tell=lambda line: None, **more)

    first, *others = world.run(work)
    assert not any(others)
    return first


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in a folder of one file."""
    return load_file(folder / "model.safetensors")
