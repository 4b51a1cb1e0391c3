"""Small trainings for the tests of profilers, on ranks that are threads."""

from __future__ import annotations

import shlex
from pathlib import Path

from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain_on

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 63 "
    "--tokenizer-type NullTokenizer --mock-data --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant "
    "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 4 --log-interval 2 "
    "--num-workers 0 --device cpu"
)


def config_of(flags: str, world_size: int = 1) -> Config:
    return parse_config([*shlex.split(FLAGS), *shlex.split(flags)], world_size=world_size).config


def train(flags: str, folder: Path | None = None, **axes: int) -> None:
    """Train with these flags beside `FLAGS`, on a grid of these axes; files go to the folder."""
    grid = ProcessGrid(**axes)
    size = grid.pp * grid.dp * grid.cp * grid.tp
    batch = "" if "--global-batch-size" in flags else f"--global-batch-size {8 * grid.dp}"
    layout = f"--pipeline-model-parallel-size {grid.pp} --tensor-model-parallel-size {grid.tp}"
    where = "" if folder is None else f"--profile-dir {folder}"
    config = config_of(f"{batch} {layout} {where} {flags}", size)
    if size == 1:
        pretrain_on(config, solo_context())
        return
    world = ThreadWorld(size)
    world.run(lambda rank: pretrain_on(config, thread_context(world, grid, rank)))
