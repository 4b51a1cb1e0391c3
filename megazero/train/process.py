"""A rank's way around its work: it sets up its process, joins the job, reports errors and leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from megazero.config.derive import replicas_per_node
from megazero.config.tree.config import Config
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch, join, leave, reporting
from megazero.mpu.malloc import keep_freed_memory
from megazero.ops.attention import varying_shapes
from megazero.train.guards.agreement import settings_and_code
from megazero.train.parts.attention import shapes_vary
from megazero.train.step.state import TrainState


def compute_deterministically() -> None:
    """Choose deterministic kernels for the rest of the process; an operator that has none raises an error.

    Call this before the first product on a GPU, since cuBLAS reads its setting once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or sums depend on timing
    torch.use_deterministic_algorithms(True)
    # Nothing reads such memory. torch sets the module's class at run time, which mypy cannot know.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_products(*, tf32: bool) -> None:
    """Let CUDA's 16-bit products add in fp32 throughout, and its fp32 products read TF32 only if asked to.

    By default torch lets products add their parts in 16 bits.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.fp32_precision = "tf32" if tf32 else "ieee"


def in_job(
    config: Config, launch: Launch | None, work: Callable[[ParallelContext], TrainState]
) -> TrainState:
    """Do `work` as a rank of the job: join it, report what goes wrong to the others, leave it."""
    keep_freed_memory()
    if config.training.deterministic_mode:
        compute_deterministically()
    choose_products(tf32=config.precision.tf32)
    place, nodes = launch or Launch.from_environment(), replicas_per_node(config.zero)
    facts = partial(settings_and_code, config, place.speaks_for_node)
    joined = join(config.parallel, place, nodes, facts, zero_stage=config.zero.stage)
    varies = shapes_vary(config.curriculum, config.skipping, config.model)
    with reporting(joined), varying_shapes(varies):
        state = work(joined)
    leave(joined)
    return state
