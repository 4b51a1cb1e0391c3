"""Where all parts meet: from a configuration to a run. No other file knows all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import Disk
from megazero.checkpoint.hf import HFReader
from megazero.config.derive import batch_ramp, global_batch_size, lr_lengths, train_length
from megazero.config.tree import Config
from megazero.data import DatasetRequest, GPTSettings, SamplerSpec, build_gpt_datasets, parse_blend
from megazero.layers import initialize_parameters
from megazero.models import Batch
from megazero.mpu import (
    Launch,
    ParallelContext,
    SampleStreams,
    TrafficLog,
    count_traffic,
    join,
    leave,
    reporting,
)
from megazero.optim import (
    Progress,
    build_learning_rate,
    build_loss_scaler,
    build_update_rule,
    build_weight_decay,
)
from megazero.pipeline import Executor
from megazero.train.allocator import keep_freed_memory
from megazero.train.engine import Engine, Programs
from megazero.train.feed import Feed, make_feed
from megazero.train.flops import flops_per_token, measure_matmul_rate
from megazero.train.loop import Feeds, Loop, Plan
from megazero.train.model import (
    DTYPES,
    Chunks,
    Vocabulary,
    build_chunks,
    build_vocabulary,
    evaluation_program,
    train_program,
)
from megazero.train.monitors import build_monitors
from megazero.train.resume import resume
from megazero.train.snapshot import Snapshots
from megazero.train.state import TrainState
from megazero.zero import DataParallel, Optimizer, Unit, ZeroPolicy, build_buckets


def build_engine(config: Config, chunks: Chunks, context: ParallelContext) -> Engine:
    """This rank's parts of the model with their optimizer, loss scale and schedules.

    Parameters on the meta device get memory and the seed's weights here, unit by unit.
    """
    policy = ZeroPolicy.of(config.zero)
    units = [
        Unit(number, block, tuple(block.parameters()))
        for number, chunk in chunks.items()
        for block in chunk.blocks()
    ]
    fill = partial(
        initialize_parameters,
        seed=config.training.seed,
        tp_rank=context.tp.rank,
        tp_size=context.tp.size,
    )
    buckets = build_buckets(units, policy, context, fill)
    executor = Executor(chunks, context.pp, DataParallel(units, buckets, policy, context), context.device)
    length = train_length(config, context.data.size)
    end = Progress(length.iterations, length.samples, length.tokens)
    return Engine(
        executor,
        Programs(cache(partial(train_program, config)), cache(partial(evaluation_program, config))),
        Optimizer(buckets, build_update_rule(config.optimizer), context, config.optimizer.clip_grad),
        build_loss_scaler(config.precision),
        (
            build_learning_rate(config.optimizer, lr_lengths(config, context.data.size)),
            build_weight_decay(config.optimizer, end),
        ),
        context,
    )


def build_feeds(config: Config, vocabulary: Vocabulary, context: ParallelContext, stream_seed: int) -> Feeds:
    """Samples of the three splits, as many as the training will take (which fixes their order).

    Raises:
        DataError: files are missing or damaged, or hold too little for one sample.
    """
    data, training = config.data, config.training
    final = global_batch_size(config, context.data.size)
    length = train_length(config, context.data.size)
    evaluated = training.eval_iters * final
    request = DatasetRequest(
        settings=GPTSettings(
            sequence_length=config.model.seq_length,
            seed=training.seed,
            cache_dir=data.data_cache_path or default_cache(data.data_path or data.train_data_path),
            vocab_size=vocabulary.size,
            eod_token=vocabulary.eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        ),
        num_samples=(
            0 if training.skip_train else length.samples,
            evaluated * (length.iterations // training.eval_interval + 1),
            evaluated,
        ),
        data_path=data.data_path,
        split=data.split,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        train_exact_num_epochs=data.train_data_exact_num_epochs,
        mock=data.mock_data,
    )
    splits = build_gpt_datasets(request)

    def feed(dataset, kind: str, ahead: int, seed: int | None) -> Feed | None:
        if dataset is None:
            return None
        spec = SamplerSpec(
            num_samples=len(dataset),
            micro_batch_size=config.batch.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            kind=kind,
            seed=training.seed,
        )
        return make_feed(dataset, spec, Collate(context.device, data.reset_position_ids, seed), ahead)

    train, valid, test = splits
    return Feeds(
        feed(train, data.dataloader_type, data.num_workers, stream_seed),
        feed(valid, data.dataloader_type, 0, None),
        feed(test, data.dataloader_type, 0, None),
    )


def default_cache(paths: tuple[str, ...]) -> str | None:
    """Beside the first dataset, where Megatron-DeepSpeed keeps its indexes too."""
    if not paths:
        return None
    _, prefix = parse_blend(paths, must_exist=False)[0]
    return str(Path(prefix).parent / "index-cache")


@dataclass(frozen=True)
class Collate:
    """Arrays to a `Batch`. What would change nothing (a mask of ones, plain positions) is left out.

    `seed` is that of the dropout streams; None for evaluation, which drops nothing.
    """

    device: torch.device
    with_positions: bool
    seed: int | None

    def __call__(self, arrays: Mapping[str, Any], samples: tuple[int, ...]) -> Batch:
        kept = {k: v for k, v in arrays.items() if k != "position_ids" or self.with_positions}
        if "loss_mask" in kept and kept["loss_mask"].all():
            del kept["loss_mask"]
        streams = None if self.seed is None else SampleStreams(self.seed, samples)
        return Batch.from_arrays(kept, self.device, streams)


def build_plan(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Plan:
    """What the loop will do."""
    training, logging = config.training, config.logging
    minutes = training.exit_duration_in_mins
    return Plan(
        iterations=train_length(config, context.data.size).iterations,
        ramp=batch_ramp(config, context.data.size),
        sequence_length=config.model.seq_length,
        flops_per_token=flops_per_token(config.model, vocabulary.padded),
        matmul_rate=measure_matmul_rate(DTYPES[config.precision.dtype], context.device),
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        save_interval=config.checkpoint.save_interval,
        exit_interval=training.exit_interval,
        exit_seconds=None if minutes is None else minutes * 60,
        log_params_norm=logging.log_params_norm,
        log_num_zeros=logging.log_num_zeros_in_grad,
        exact_timers=logging.log_timers_to_tensorboard,
    )


def pretrain(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Run a training as configured, on this rank of the job.

    Args:
        config: of the run.
        launch: this rank's place; default: as the launcher says.
        disk: what writes the checkpoints.

    Raises:
        MegazeroError: whatever of the user's to mend stands in the way.
    """
    keep_freed_memory()
    joined = join(config.parallel, launch or Launch.from_environment(), config.zero.hpz_partition_size)
    with reporting(joined):
        state = _train(config, joined, disk)
    leave(joined)
    return state


def _train(config: Config, joined: ParallelContext, disk: Disk | None) -> TrainState:
    traffic = TrafficLog()
    context = count_traffic(joined, traffic) if config.logging.comms_logger else joined
    vocabulary = build_vocabulary(config)

    def build(config: Config) -> Engine:
        return build_engine(config, build_chunks(config, vocabulary, context), context)

    foreign = partial(HFReader.for_model, model=config.model, vocab_size=vocabulary.size)
    resumed = resume(config, context, vocabulary.size, build, foreign)
    config, engine, state = resumed.config, resumed.engine, resumed.state
    feeds = build_feeds(config, vocabulary, context, resumed.stream_seed)
    plan = build_plan(config, vocabulary, context)
    monitor = build_monitors(config, context.rank == 0, state.iteration, plan.iterations)
    for remark in resumed.remarks:
        monitor.message(remark)
    snapshots = None
    try:
        if config.checkpoint.save and not config.training.skip_train:
            snapshots = Snapshots(config, engine, context, vocabulary.size, resumed.stream_seed, disk)
        loop = Loop(engine, plan, feeds, monitor, snapshots, context)
        if config.training.skip_train:
            for split in ("validation", "test"):
                if (feeds.valid if split == "validation" else feeds.test) is not None:
                    loop.evaluate(split, state)
        else:
            state = loop.fit(state)
        for line in traffic.table():
            monitor.message(f"communication of rank 0 | {line}")
    finally:
        if snapshots is not None:
            snapshots.saver.close()
        monitor.close()
        if feeds.train is not None:
            feeds.train.close()
    return state
