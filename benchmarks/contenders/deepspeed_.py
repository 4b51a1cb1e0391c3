"""DeepSpeed on the plain GPT: ZeRO stages 0 to 3, its own bf16 mode, accumulation and clipping.

The optimizer is PyTorch's fused AdamW, as for the other contenders. On CPUs, DeepSpeed compiles an extension
for its shared-memory collectives when it is first started, before anything is timed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

import torch

from benchmarks.contenders import Shape
from benchmarks.contenders.plain import PlainGPT

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


def _engine(shape: Shape, rank: int, world_size: int, stage: int, offload: str | None, folder: str):
    """DeepSpeed reads its device and its rank from the environment, when it is imported."""
    os.environ["DS_ACCELERATOR"] = shape.device
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import deepspeed

    model = PlainGPT(shape).to(torch.device(shape.device, rank) if shape.device == "cuda" else "cpu")
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
):
    # Its log goes to standard output, where it would mix with the JSON lines.
    with contextlib.redirect_stdout(sys.stderr):
        engine = _engine(shape, rank, world_size, stage, offload, folder)
    batches = shape.batches(rank)

    def step() -> float:
        for tokens, labels in batches:
            loss = engine(tokens, labels)
            engine.backward(loss)  # divides by the accumulations
            engine.step()  # acts with the last micro-batch only
        return float(loss.detach())

    return step
