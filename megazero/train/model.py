"""From a configuration to this rank's parts of the model: vocabulary, dealt layers, programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from megazero.config.derive import chunks_per_stage, padded_vocab_size, schedule_kind
from megazero.config.tree import Config
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, build_tokenizer
from megazero.errors import ConfigError
from megazero.layers import Placement, initialize
from megazero.models import GPT, Batch, Part
from megazero.mpu import ParallelContext
from megazero.pipeline import Program, Schedule, build_schedule, lower, partition_layers
from megazero.train.flops import flops_per_token
from megazero.train.timers import Timers
from megazero.zero import STAGES

DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})

Chunks = dict[int, GPT]
"""This rank's parts of the model, by their numbers along the model."""


@dataclass(frozen=True)
class Vocabulary:
    """What the model and the data need to know of the tokenizer.

    `padded` is `size` rounded up so that it divides over the tensor-parallel ranks.
    """

    size: int
    padded: int
    eod: int | None
    tokenizer: Tokenizer | None


def build_vocabulary(config: Config) -> Vocabulary:
    """From the tokenizer's files, or from `--vocab-size` alone.

    Raises:
        ConfigError: `--vocab-size` is smaller than the tokenizer's vocabulary, or neither is given.
        DataError: the tokenizer's files are missing or unsuitable.
    """
    section, size = config.tokenizer, config.model.vocab_size
    tokenizer = None
    if section.tokenizer_type is not None:
        tokenizer = build_tokenizer(
            TokenizerSpec(
                section.tokenizer_type,
                vocab_file=section.vocab_file,
                merge_file=section.merge_file,
                model=section.tokenizer_model,
                vocab_size=size if section.tokenizer_type == "NullTokenizer" else None,
                extra_ids=section.vocab_extra_ids,
            )
        )
        if size is not None and section.tokenizer_type != "NullTokenizer" and size < tokenizer.vocab_size:
            raise ConfigError(
                f"`vocab_size` must be at least the tokenizer's {tokenizer.vocab_size}, but is "
                f"{size}; leave it out"
            )
        size = max(size or 0, tokenizer.vocab_size)
    if size is None:
        raise ConfigError("`vocab_size` must be known, but is not; set --tokenizer-type or --vocab-size")
    padded = padded_vocab_size(
        size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )
    return Vocabulary(size, padded, tokenizer.eod if tokenizer else None, tokenizer)


def schedule_of(config: Config, microbatches: int | None = None, *, forward_only: bool = False) -> Schedule:
    """The configured pipeline schedule; of any number of micro-batches where only the stages matter."""
    stages, per_stage = config.parallel.pipeline_model_parallel_size, chunks_per_stage(config)
    kind = schedule_kind(config)
    count = microbatches or 2 * stages
    if forward_only:
        return build_schedule("forward", stages, count, per_stage, v_shape=kind == "zb-v")
    return build_schedule(kind, stages, count, per_stage)


def train_program(config: Config, microbatches: int) -> Program:
    """What the stages do in a training step of so many micro-batches per replica."""
    row = STAGES[config.zero.stage]
    schedule = schedule_of(config, microbatches)
    return lower(schedule, gather=row.shard_params, reduce_every_microbatch=row.shard_grads)


def evaluation_program(config: Config, microbatches: int) -> Program:
    """What the stages do to evaluate so many micro-batches per replica."""
    row = STAGES[config.zero.stage]
    schedule = schedule_of(config, microbatches, forward_only=True)
    return lower(schedule, gather=row.shard_params, reduce_every_microbatch=False)


def build_chunks(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device | None = None
) -> Chunks:
    """This rank's parts of the model: shapes on the meta device, or the seed's weights on `device`.

    Raises:
        ConfigError: the layers cannot be dealt to the stages as configured.
    """
    placement = placement_of(config, context, device or torch.device("meta"))
    stage_of = schedule_of(config).stage_of
    tied = not config.model.untie_embeddings_and_output_weights
    vocab = vocabulary.size, vocabulary.padded
    chunks: Chunks = {}
    for number, layers in enumerate(deal_layers(config, vocabulary, context)):
        if stage_of[number] != context.pp.rank:
            continue
        first, last = number == 0, number == len(stage_of) - 1
        part = Part(layers, first, last, shared=first and tied and stage_of[0] != stage_of[-1])
        # In a V-shaped pipeline the first chunk is on the last one's stage, and they share one weight.
        weight = chunks[0].embedding.word if last and not first and tied and 0 in chunks else None
        chunks[number] = GPT(config.model, vocab, placement, config.recompute, part, weight)
        if device is not None:
            initialize(chunks[number], config.training.seed, context.tp.rank, context.tp.size)
    return chunks


def placement_of(config: Config, context: ParallelContext, device: torch.device) -> Placement:
    """Where this rank's layers live."""
    dtype = DTYPES[config.precision.dtype]
    placement = Placement.of(context, dtype, sequence_parallel=config.parallel.sequence_parallel)
    return replace(placement, device=device)


def deal_layers(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> list[range]:
    """Which layers each chunk holds, by `--pipeline-partition`.

    Raises:
        ConfigError: there are fewer layers than chunks, or the method's numbers do not fit.
    """
    method = config.parallel.pipeline_partition
    weigh: dict[str, Callable] = {
        "parameters": parameter_counts,
        "cost": estimated_costs,
        "measured": measured_costs,
    }
    costs = weigh[method](config, vocabulary, context) if method in weigh else (0.0, 1.0, 0.0)
    embedding, layer, head = costs
    count = config.model.num_layers
    return partition_layers(
        method,
        count,
        len(schedule_of(config).stage_of),
        embedding=embedding,
        layers=[layer] * count,
        head=head,
        types=["TransformerLayer"] * count,
    )


Costs = tuple[float, float, float]
"""Of the embedding, one layer and the head."""


def parameter_counts(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Parameters of each block; a tied head counts, as its stage holds a copy."""
    blocks = [piece.parameters() for piece in _pieces(config, vocabulary, context, torch.device("meta"))]
    embedding, layer, head = (float(sum(p.numel() for p in block)) for block in blocks)
    return embedding, layer, head


def estimated_costs(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """FLOPs of each block per token; looking up an embedding takes none."""
    one = config.model.model_copy(update={"num_layers": 1})
    layer = flops_per_token(one, 0)
    return 0.0, layer, flops_per_token(one, vocabulary.padded) - layer


def measured_costs(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Seconds of forward and backward of each block for a micro-batch: best of three, slowest rank."""
    shape = 2, config.batch.micro_batch_size, config.model.seq_length
    batch = Batch(*torch.zeros(shape, dtype=torch.long, device=context.device))
    seconds = torch.zeros(3, dtype=torch.float64, device=context.device)
    for i, piece in enumerate(_pieces(config, vocabulary, context, context.device)):
        initialize(piece, config.training.seed, context.tp.rank, context.tp.size)
        hidden = torch.zeros(piece.hidden_shape(batch), dtype=piece.hidden_dtype, device=context.device)
        seconds[i] = min(_seconds(piece, batch, hidden.requires_grad_()) for _ in range(3))
    context.world.all_reduce(seconds, "max").wait()
    embedding, layer, head = seconds.tolist()
    return embedding, layer, head


def _seconds(model: GPT, batch: Batch, hidden: torch.Tensor) -> float:
    timers = Timers(hidden.device, synchronize=True)
    with timers("block"):
        result = model.hidden(batch, hidden) if model.head is None else model.loss(batch, hidden)[0]
        result.sum().backward()
    return timers.collect()["block"]


def _pieces(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device
) -> tuple[GPT, GPT, GPT]:
    """The embedding alone, one layer alone, the head alone."""
    shape = config.model.model_copy(update={"num_layers": 1, "untie_embeddings_and_output_weights": True})
    vocab, placement = (vocabulary.size, vocabulary.padded), placement_of(config, context, device)

    def piece(part: Part) -> GPT:
        return GPT(shape, vocab, placement, config.recompute, part)

    return (
        piece(Part(range(0), head=False)),
        piece(Part(range(1), embedding=False, head=False)),
        piece(Part(range(0), embedding=False)),
    )
