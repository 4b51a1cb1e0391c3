"""The frame of a rank's work: set up the process, join the job, report errors, leave the job."""

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
    """Use deterministic kernels in this process; an operator without one raises an error.

    Call this before the first product on a GPU, because cuBLAS reads its setting once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise sums depend on timing
    torch.use_deterministic_algorithms(True)
    # No code reads uninitialized memory. mypy cannot know this attribute, which torch defines at run time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_products(*, tf32: bool) -> None:
    """Make CUDA's 16-bit products accumulate in fp32, and its fp32 products use TF32 only if asked to.

    By default torch allows 16-bit products to reduce partial sums in 16 bits.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.fp32_precision = "tf32" if tf32 else "ieee"


def in_job(
    config: Config, launch: Launch | None, work: Callable[[ParallelContext], TrainState]
) -> TrainState:
    """Do `work` as a rank of the job: join it, report errors to the other ranks, leave it."""
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
