"""DeepSpeed's API on the plain GPT: ZeRO stages 0 to 3, its own bf16 mode, accumulation and clipping.

The package that answers to it is DeepSpeed, or megazero in its place; then the model may be ours, too.
The optimizer is PyTorch's fused AdamW, as for the other contenders. On CPUs, DeepSpeed compiles an extension
for its shared-memory collectives when it is first started, before anything is timed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile

import torch

from benchmarks.contenders import Shape
from benchmarks.contenders.ours import make_config, vocabulary_of
from benchmarks.contenders.plain import PlainGPT
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.models.batch import Batch
from megazero.models.targets import Targets
from megazero.mpu.context import solo_context
from megazero.train.parts.chunks import build_chunks

# Elements per bucket, megazero's default. DeepSpeed's own default, 500 million, would allocate a
# buffer of 20 times this model.
BUCKET = 16_000_000


def _config(shape: Shape, world_size: int, stage: int) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.accumulations,
        "train_batch_size": shape.micro_batch * shape.accumulations * world_size,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": shape.dtype == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "steps_per_print": 10**9,
    }
    # Outside ZeRO, DeepSpeed refuses to accumulate the gradients of a bf16 model in fp32.
    if stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _offloaded(config: dict, device: str, folder: str) -> dict:
    """The same with masters and moments on the host or on disk, which DeepSpeed's own Adam updates."""
    place = {"device": device, "pin_memory": False}
    if device == "nvme":
        place |= {"nvme_path": folder, "buffer_count": 4, "pipeline_read": True, "pipeline_write": True}
    return config | {"zero_optimization": config["zero_optimization"] | {"offload_optimizer": place}}


class OurGPT(torch.nn.Module):
    """megazero's model as a script would use it: tokens and labels go in, the mean loss comes out."""

    def __init__(self, shape: Shape):
        super().__init__()
        config = make_config(shape, 1, ParallelConfig(), ZeroConfig())
        (self.chunk,) = build_chunks(
            config, vocabulary_of(shape), solo_context(torch.device("cpu")), torch.device("cpu")
        ).values()

    def forward(self, tokens, labels):
        return self.chunk.run(Batch(tokens, Targets(labels))).terms["lm"] / labels.numel()


def _engine(
    shape: Shape,
    rank: int,
    world_size: int,
    stage: int,
    offload: str | None,
    folder: str,
    package: str,
    ours: bool,
):
    """DeepSpeed reads its device and its rank from the environment, when it is imported."""
    os.environ["DS_ACCELERATOR"] = shape.device
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    deepspeed = importlib.import_module(package)
    model = OurGPT(shape) if ours else PlainGPT(shape)
    model = model.to(torch.device(shape.device, rank) if shape.device == "cuda" else "cpu")
    facts = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    config = _config(shape, world_size, stage)
    if offload is None:
        optimizer = torch.optim.AdamW(model.parameters(), **facts, fused=True)
    else:
        config = _offloaded(config, offload, folder)
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **facts)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
    )
    return engine


def build(
    shape: Shape,
    rank: int,
    world_size: int,
    stage: int = 0,
    offload: str | None = None,
    folder: str = tempfile.gettempdir(),
    package: str = "deepspeed",
    ours: bool = False,
):
    # Its log goes to standard output, where it would mix with the JSON lines.
    with contextlib.redirect_stdout(sys.stderr):
        engine = _engine(shape, rank, world_size, stage, offload, folder, package, ours)
    batches = shape.batches(rank)

    def step() -> float:
        for tokens, labels in batches:
            loss = engine(tokens, labels)
            engine.backward(loss)  # divides by the accumulations
            engine.step()  # acts with the last micro-batch only
        return float(loss.detach())

    return step
