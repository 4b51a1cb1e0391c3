"""Law 1: any layout trains the same model as one process.

Here a layout is run and what it did written down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.config.tree import (
    BatchConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainingConfig,
)
from megazero.models import Batch
from megazero.mpu import (
    ParallelContext,
    ProcessGrid,
    SampleStreams,
    ThreadWorld,
    solo_context,
    thread_context,
)
from megazero.train.assemble import Vocabulary, build_engine, build_model
from megazero.train.state import TrainState
from megazero.train.timers import Timers

STEPS = 5
GLOBAL_BATCH = 4
SEQ = 16
VOCAB = 61  # prime: it must be padded on every layout, and differently

SHAPES = {
    "gpt2": {
        "num_attention_heads": 4,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
    },
    "llama": {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
    },
}


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    shape: str = "gpt2"
    untied: bool = False
    recompute: str = "none"
    dropout: float = 0.0
    overlap: bool = True
    dtype: str = "fp32"
    bucket_size: int = 3000  # several buckets, even of this small model
    micro_batch: int = 1  # the serial run always accumulates sample by sample

    @property
    def serial(self) -> Case:
        """The same model in one process, nothing recomputed."""
        return Case(shape=self.shape, untied=self.untied, dropout=self.dropout, dtype=self.dtype)

    @property
    def name(self) -> str:
        parts = [self.shape, f"T{self.tp}", f"D{self.dp}", "SP" if self.sequence_parallel else "-"]
        return "-".join([*parts, "untied" if self.untied else "tied", self.recompute])

    def config(self) -> Config:
        return Config(
            model=ModelConfig(
                num_layers=2,
                hidden_size=32,
                seq_length=SEQ,
                ffn_hidden_size=48,
                vocab_size=VOCAB,
                make_vocab_size_divisible_by=4,
                hidden_dropout=self.dropout,
                attention_dropout=self.dropout,
                untie_embeddings_and_output_weights=self.untied,
                init_method_std=0.1,
                **SHAPES[self.shape],
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                sequence_parallel=self.sequence_parallel,
                bucket_size=self.bucket_size,
                overlap_grad_reduce=self.overlap,
            ),
            batch=BatchConfig(micro_batch_size=self.micro_batch, global_batch_size=GLOBAL_BATCH),
            # Clipping is active. Epsilon is far above rounding noise: the key bias has no gradient but noise
            # (softmax does not feel it), which Adam would otherwise blow up to whole steps.
            optimizer=OptimizerConfig(
                lr=1e-2, clip_grad=0.5, lr_warmup_iters=2, weight_decay=0.1, adam_eps=1e-4
            ),
            recompute=RecomputeConfig(granularity=self.recompute),
            precision=PrecisionConfig(dtype=self.dtype),
            training=TrainingConfig(train_iters=STEPS, seed=7),
        )


@dataclass(frozen=True)
class Record:
    """What one training did, gathered from all slices: per step, then by parameter."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: list[dict[str, Tensor]]


def micro_batches(step: int, context: ParallelContext, size: int = 1) -> list[Batch]:
    """This rank's samples of a step, `size` at a time.

    Masks are uneven: sample i counts about 1 / (1 + i) of its positions.
    """
    rng = np.random.default_rng(100 + step)
    text = rng.integers(0, VOCAB, (GLOBAL_BATCH, SEQ + 1))
    mask = (rng.random((GLOBAL_BATCH, SEQ)) < 1.0 / (1 + np.arange(GLOBAL_BATCH))[:, None]).astype(np.float32)
    batches = []
    for i in range(context.data.rank * size, GLOBAL_BATCH, context.data.size * size):
        rows = slice(i, i + size)
        arrays = {"tokens": text[rows, :-1], "labels": text[rows, 1:], "loss_mask": mask[rows]}
        streams = SampleStreams(3, tuple(step * GLOBAL_BATCH + j for j in range(i, i + size)))
        arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        batches.append(Batch.from_arrays(arrays, context.device, streams))
    return batches


def train(case: Case, context: ParallelContext) -> Record:
    """Train `STEPS` steps on this rank of the layout; every rank returns the whole record."""
    config = case.config()
    padding = 4 * case.tp
    vocabulary = Vocabulary(VOCAB, -(-VOCAB // padding) * padding, None, None)
    engine = build_engine(config, build_model(config, vocabulary, context), context)
    record = Record([], [], [], [])
    state, timers = TrainState(), Timers()
    optimizer = engine.optimizer
    for step in range(STEPS):
        tokens = GLOBAL_BATCH * SEQ
        result = engine.train_step(
            micro_batches(step, context, case.micro_batch), tokens, state.progress, timers
        )
        state = state.after(GLOBAL_BATCH, tokens, result.skipped)
        record.losses.append(result.loss)
        record.grad_norms.append(result.grad_norm)
        record.gradients.append(
            {s.name: s.unshard(g, context.tp).clone() for s, g in optimizer.named_gradients()}
        )
        record.weights.append(
            {s.name: s.unshard(v["weight"], context.tp).clone() for s, v in optimizer.named_state()}
        )
    return record


def train_serial(case: Case) -> Record:
    """The record of one process."""
    return train(case, solo_context())


def train_in_threads(case: Case) -> list[Record]:
    """The record of each rank of the layout, ranks as threads."""
    grid = ProcessGrid(dp=case.dp, tp=case.tp)
    world = ThreadWorld(grid.world_size)
    return world.run(lambda rank: train(case, thread_context(world, grid, rank)))


def assert_same(record: Record, expected: Record, rtol: float = 2e-4, atol: float = 2e-6) -> None:
    """Both trainings are one to rounding. Tolerances are for fp32 over five steps of Adam."""
    assert len(expected.losses) == STEPS
    torch.testing.assert_close(record.losses, expected.losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(record.grad_norms, expected.grad_norms, rtol=1e-4, atol=0.0)
    for kind in ("gradients", "weights"):
        for step, (got, want) in enumerate(zip(getattr(record, kind), getattr(expected, kind), strict=True)):
            assert got.keys() == want.keys()
            for name in want:
                torch.testing.assert_close(
                    got[name],
                    want[name],
                    rtol=rtol,
                    atol=atol,
                    msg=lambda m, name=name, step=step, kind=kind: f"{kind} of {name}, step {step}: {m}",
                )
