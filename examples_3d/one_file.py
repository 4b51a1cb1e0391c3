"""Train a GPT by hand, from the parts of which `pretrain_gpt.py` makes a run: the first file to read.

    python examples_3d/one_file.py
    torchrun --nproc-per-node 2 examples_3d/one_file.py --tensor 2
    torchrun --nproc-per-node 4 examples_3d/one_file.py --tensor 2 --pipeline 2
    torchrun --nproc-per-node 4 examples_3d/one_file.py --pipeline 2 --zero 3 --save /tmp/one_file

Each trains a small GPT on the pages of `docs/` for a minute, one byte a token. The losses are the same in all
four, to rounding: how a model is cut over ranks is no part of what it learns.

Read it from top to bottom. Each paragraph builds one part, says what that is, and where the rest of it lives;
`train`, at the end, puts them together. `pretrain_gpt.py` builds the same parts from a configuration and
gives the same losses and weights, bit for bit (`tests/train/test_one_file.py`). What it adds is all around
them: flags, checks, resuming, evaluation, metrics, guards. docs/tour.md walks through this file beside a
drawing of the house.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megazero.checkpoint.saver import Saver
from megazero.checkpoint.shards import parts_to_write
from megazero.config.derive import padded_vocab_size
from megazero.config.steps import Progress
from megazero.config.tree.model import ModelConfig
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.data.tokenizers.simple import ByteLevelTokenizer
from megazero.layers.initialize import initialize_parameters
from megazero.layers.placement import Placement
from megazero.models.batch import Batch, TextCollate
from megazero.models.chunk import EMBEDDING, HEAD, WORD, Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import ParallelContext, make_context, solo_context
from megazero.mpu.grid import ProcessGrid, Ranks
from megazero.mpu.group import Group
from megazero.mpu.launch import Launch, leave
from megazero.mpu.torch_group import open_group, start_world
from megazero.optim.elementwise import Adam
from megazero.optim.schedule import Decay, LearningRate, Warmup
from megazero.pipeline.actions import Program
from megazero.pipeline.executor import Executor
from megazero.pipeline.lower import lower
from megazero.pipeline.partition import partition_blocks
from megazero.pipeline.schedules import build_schedule
from megazero.spec.resolve import model_spec
from megazero.train.step.feed import Feed
from megazero.train.step.losses import local_counts, loss_factors
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.table import STAGES
from megazero.zero.unit import Unit

DOCS = Path(__file__).resolve().parent.parent / "docs"
PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Run:
    """The numbers of a training; each is a flag of `pretrain_gpt.py`, by a longer name."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    length: int = 128  # tokens of a sequence
    micro_batch: int = 4  # sequences of one forward pass
    global_batch: int = 16  # sequences of one step, over all ranks
    steps: int = 200
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 1234
    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # ranks that share the list of layers
    zero: int = 1  # what the other ranks share: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too

    def micro_batches(self, context: ParallelContext) -> int:
        """Forward passes that a rank makes in a step."""
        return self.global_batch // (self.micro_batch * context.data.size)


# 1. Ranks (megazero/mpu). A process is a rank, and the ranks form a grid: `tensor` of them hold slices of the
# same layers, `pipeline` of them hold layers that follow each other, and what is left over reads other
# samples (`dp`). The context is one rank's view of that grid: its place, and a group for each set of ranks
# that talk to each other. It is handed to whoever needs it; there is no process-wide state to look it up in.
# A group has the calls of torch.distributed and could be anything: tests have ranks that are threads. More
# axes (context, experts) are in mpu/grid.py, NCCL and the watch over calls that hang in mpu/launch.py.


def join(run: Run) -> ParallelContext:
    """Join the job that torchrun started, or be a job of one process."""
    launch = Launch.from_environment()
    grid = ProcessGrid.factor(launch.world_size, tp=run.tensor, pp=run.pipeline)
    if launch.world_size == 1:
        return solo_context()
    start_world("gloo", launch.rank, launch.world_size, PATIENCE)

    def maker(name: str, ranks: Ranks) -> Group:
        return open_group(name, launch.rank, ranks, PATIENCE)

    return make_context(grid, launch.rank, torch.device("cpu"), maker)


# 2. Data (megazero/data). Text becomes token ids in two files, Megatron's `.bin` and `.idx`; documents are
# laid end to end and cut into samples, in an order that is a function of the seed. The sampler says which
# samples are this rank's after so many were consumed; that number is all there is to know, so a training goes
# on from it exactly, on any number of ranks. `collate` turns arrays into the tensors that a model takes.
# Mixtures, BERT's and T5's samples, and the cache of indexes are in data/, tokenizers in data/tokenizers,
# reading ahead in train/step/feed.py.


def write_corpus(prefix: Path) -> None:
    """Write the pages of `docs/` as a dataset, a document for each."""
    tokenizer = ByteLevelTokenizer()
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for page in sorted(DOCS.glob("*.md")):
            writer.add_document([np.array([*tokenizer.encode(page.read_text()), tokenizer.eod])])


def feed_of(run: Run, prefix: Path, context: ParallelContext) -> Feed[Batch]:
    """This rank's micro-batches, by the number of samples consumed before."""
    settings = GPTSettings(
        run.length,
        run.seed,
        vocab_size=ByteLevelTokenizer.vocab_size,
        ends=DocumentEnds(ByteLevelTokenizer.eod),
    )
    text = open_indexed(str(prefix))
    dataset = GPTDataset(text, range(len(text)), run.steps * run.global_batch, settings)
    spec = SamplerSpec(len(dataset), run.micro_batch, context.data.rank, context.data.size)
    return Feed(dataset, BatchSampler(spec), TextCollate(ByteLevelTokenizer.vocab_size, context.device))


# 3. Model (megazero/models, megazero/layers). A GPT is a list of blocks: embedding, layers, head. A stage of
# the pipeline holds one span of the list, and a `GPT` is such a span, the whole list if there is one stage.
# The layers in it are sliced over the tensor-parallel ranks: the placement says which ranks these are, and
# each parameter carries a `ParamSpec` (mpu/param_spec.py) with its global name, its whole shape and the dims
# that are cut. Everything else follows from the spec: the slice that is initialized, what is saved, what the
# norm counts. Parameters begin on the meta device, without memory. The shape is written as `ModelConfig`, the
# section of the settings' tree about the model, whose defaults are GPT-2's; `model_spec` (megazero/spec)
# resolves it into a spec for each layer, which is all that layers read. BERT, T5, experts and Mamba-2 are
# spans of other lists.


def shape_of(run: Run) -> ModelConfig:
    """The shape of the whole model."""
    return ModelConfig(
        num_layers=run.layers,
        hidden_size=run.hidden,
        num_attention_heads=run.heads,
        seq_length=run.length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def chunk_of(run: Run, context: ParallelContext) -> GPT:
    """This rank's span of the model, without memory."""
    shape, vocabulary = shape_of(run), ByteLevelTokenizer.vocab_size
    blocks = (EMBEDDING, *range(run.layers), HEAD)
    kinds = [None if isinstance(block, str) else "layer" for block in blocks]
    spans = partition_blocks("uniform", run.pipeline, costs=[1.0] * len(blocks), types=kinds)
    placement = replace(Placement.of(context, torch.float32), device=torch.device("meta"))
    held = Slice(
        model_spec(shape),
        (vocabulary, padded_vocab_size(vocabulary, shape, run.tensor)),
        placement,
        parts=tuple(blocks[number] for number in spans[context.pp.rank]),
        # The head predicts with the embedding's weight; on another stage it has a copy of that.
        copied=frozenset({WORD} if run.pipeline > 1 else ()),
    )
    return GPT(held)


# 4. ZeRO (megazero/zero). Replicas of the same weights need not all keep everything. The parameters move into
# flat buckets, in the order in which backward completes their gradients; a row of a table (zero/table.py)
# says for each stage what is sharded over the replicas: optimizer state, gradients, weights. A unit is what
# stage 3 gathers at once, a block. `fill` writes a bucket's first weights, each number a function of the
# seed, the parameter's name and its place in the whole parameter, so that any layout begins with the same
# model. Offload to host and disk is another store (zero/store), codes on the wire are other hooks
# (zero/comm_hooks).


def shard(run: Run, chunk: GPT, rule: Adam, context: ParallelContext) -> tuple[DataParallel, Optimizer]:
    """Give the parameters memory and values, and make what gathers, reduces and updates them."""
    policy = ZeroPolicy(stage=run.zero, needs=rule.needs)
    units = [Unit(context.pp.rank, block, tuple(block.parameters())) for block in chunk.blocks()]
    fill = partial(initialize_parameters, seed=run.seed, place=context.place)
    store = build_store(units, policy, context, fill)
    return DataParallel(units, store, policy, context), Optimizer(store, rule, context, run.clip)


# 5. Pipeline (megazero/pipeline). A schedule is a value: for each stage, which chunk computes which
# micro-batch when, forward or backward. `lower` adds what follows from it: messages between stages, in an
# order that cannot lock, when gradients are reduced and when weights are gathered. The executor then carries
# out one stage's list and decides nothing. One stage is a pipeline of one, with nothing to send. Interleaved
# and zero-bubble schedules are other pure functions in pipeline/schedules.py; pipeline/simulate.py runs any
# of them on paper.


def program_of(run: Run, micro_batches: int) -> Program:
    """What each stage does in a step, one instruction after another."""
    row = STAGES[run.zero]
    schedule = build_schedule("1f1b", run.pipeline, micro_batches)
    return lower(schedule, gather=row.shard_params, reduce_every_microbatch=row.shard_grads)


# 6. Update (megazero/optim). The rule is arithmetic on flat pieces of fp32 weights and knows of no ranks, so
# it need not know how they are sharded. Learning rate and weight decay are pure functions of the progress.
# More rules, from LAMB to Muon, are in optim/, loss scales for fp16 in optim/loss_scaler.py.


def rates_of(run: Run) -> LearningRate:
    """The learning rate over the training: it rises from 0, and falls along a cosine."""
    return LearningRate(run.lr, run.min_lr, Warmup(run.warmup), Decay("cosine", run.steps))


# 7. A step. Every token of the global batch counts the same, on whichever rank and in whichever micro-batch
# it is: the losses are summed, the gradients of these sums too, and both divided by the count of the whole
# batch, which is known before. That is why no layout changes the numbers. train/step/engine.py is this
# function with loss scales, several loss terms, experts, distillation and updates that a GPU decides about.


@dataclass(frozen=True)
class Trainer:
    """The parts that a step needs, on this rank."""

    executor: Executor[Batch]
    optimizer: Optimizer
    program: Program
    context: ParallelContext

    def step(self, batches: Sequence[Batch], lr: float, weight_decay: float) -> tuple[float, float]:
        """Train on this rank's part of a global batch; returns the loss and the norm of the gradient."""
        terms, context = self.executor.terms, self.context  # of a GPT: the mean cross-entropy, `lm`
        counts = local_counts(terms, batches, context)
        context.batch.all_reduce(counts).wait()
        factors = loss_factors(terms, counts, scale=1.0)
        sums = self.executor.train(self.program, batches, factors, self.optimizer.updates).terms
        context.pp.all_reduce(sums).wait()  # the last stage has them, the others zeros
        context.batch.all_reduce(sums).wait()
        report = self.optimizer.step(lr, weight_decay)
        return float(sums[0] / counts[0]), report.grad_norm


def trainer_of(run: Run, context: ParallelContext) -> Trainer:
    """Put the parts of this rank together."""
    chunk, rule = chunk_of(run, context), Adam(beta2=0.95)
    sharding, optimizer = shard(run, chunk, rule, context)
    executor: Executor[Batch] = Executor({context.pp.rank: chunk}, context.pp, sharding, context.device)
    return Trainer(executor, optimizer, program_of(run, run.micro_batches(context)), context)


# 8. The loop. Consumed samples are the only clock. train/loop.py is this loop with what looks at a run after
# each step: saving, evaluation, guards against spikes and hanging ranks, signals, metrics (train/observe).


def train(run: Run, prefix: Path, context: ParallelContext, folder: str | None = None) -> list[float]:
    """Put the parts together and train; returns the loss of each step.

    Args:
        run: the numbers of the training.
        prefix: the dataset, as `write_corpus` writes it.
        context: this rank's place and groups.
        folder: where to save the weights at the end.
    """
    trainer, feed, rates = trainer_of(run, context), feed_of(run, prefix, context), rates_of(run)
    losses = []
    for step in range(run.steps):
        samples = step * run.global_batch
        batches = feed.micro_batches(samples, run.micro_batches(context))
        rate = rates.at(Progress(step, samples, samples * run.length))
        loss, norm = trainer.step(batches, rate, run.weight_decay)
        losses.append(loss)
        if context.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:4d} | loss {loss:.6f} | gradient norm {norm:.3f}", flush=True)
    if folder is not None:
        save(folder, run, trainer.optimizer, context)
    return losses


# 9. The checkpoint (megazero/checkpoint). A rank writes the boxes of whole tensors that it owns; a
# description says which box lies in which file. So a checkpoint has no layout, and any other number of ranks
# can read it. With what is said of the model here, `megazero generate --load` continues text with it, and
# `pretrain_gpt.py --load ... --finetune` trains it further. Saving while training goes on is in
# checkpoint/saver.py, resuming in train/resume.


def save(folder: str, run: Run, optimizer: Optimizer, context: ParallelContext) -> None:
    """Write weights and moments as a checkpoint; every rank calls this."""
    facts = {
        "kind": "one_file",
        "vocab_size": ByteLevelTokenizer.vocab_size,
        "model": shape_of(run).model_dump(mode="json"),
        "tokenizer": {"tokenizer_type": ByteLevelTokenizer.name},
    }
    saver = Saver(folder, context)
    saver.save(run.steps, parts_to_write(optimizer, context), facts)
    saver.close()


def main() -> None:
    """Read the flags, join the job and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=Run.steps, help="optimizer steps")
    parser.add_argument("--tensor", type=int, default=Run.tensor, help="ranks that share each layer")
    parser.add_argument("--pipeline", type=int, default=Run.pipeline, help="ranks that share the layers")
    parser.add_argument("--zero", type=int, default=Run.zero, help="stage of ZeRO, 0 to 3")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    flags = parser.parse_args()
    run = Run(steps=flags.steps, tensor=flags.tensor, pipeline=flags.pipeline, zero=flags.zero)
    context = join(run)
    with tempfile.TemporaryDirectory() as corpus:  # each rank has its own
        write_corpus(Path(corpus) / "docs")
        train(run, Path(corpus) / "docs", context, flags.save)
    leave(context)


if __name__ == "__main__":
    main()
