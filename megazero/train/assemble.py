"""Where all parts meet: from a configuration to a run. No other file knows all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint import (
    Snapshot,
    iteration_folder,
    latest_iteration,
    read_facts,
    read_tensors,
    save_checkpoint,
)
from megazero.config.derive import batch_ramp, global_batch_size, lr_lengths, padded_vocab_size, train_length
from megazero.config.tree import Config
from megazero.data import DatasetRequest, GPTSettings, SamplerSpec, build_gpt_datasets, parse_blend
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, build_tokenizer
from megazero.errors import CheckpointError, ConfigError
from megazero.layers import Placement, initialize
from megazero.models import GPT, Batch
from megazero.mpu import Launch, ParallelContext, SampleStreams, join, leave, spec_of
from megazero.optim import (
    Progress,
    ScalerState,
    build_learning_rate,
    build_loss_scaler,
    build_update_rule,
    build_weight_decay,
)
from megazero.train.allocator import keep_freed_memory
from megazero.train.engine import Engine
from megazero.train.feed import Feed, make_feed
from megazero.train.flops import flops_per_token, measure_matmul_rate
from megazero.train.loop import Feeds, Loop, Plan
from megazero.train.monitors import build_monitors
from megazero.train.state import TrainState
from megazero.zero import GradientReducer, Optimizer, build_buckets

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.get


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


def build_model(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> GPT:
    """This rank's part of the model, initialized from the seed."""
    placement = Placement.of(
        context, DTYPES(config.precision.dtype), sequence_parallel=config.parallel.sequence_parallel
    )
    model = GPT(config.model, (vocabulary.size, vocabulary.padded), placement, config.recompute)
    initialize(model, config.training.seed, context.tp.rank, context.tp.size)
    return model


def build_engine(config: Config, model: GPT, context: ParallelContext) -> Engine:
    """The model with its optimizer, loss scale and schedules."""
    buckets = build_buckets(model, config.parallel.bucket_size)
    length = train_length(config, context.data.size)
    end = Progress(length.iterations, length.samples, length.tokens)
    return Engine(
        model,
        GradientReducer(buckets, context, overlap=config.parallel.overlap_grad_reduce),
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
        matmul_rate=measure_matmul_rate(DTYPES(config.precision.dtype), context.device),
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        save_interval=config.checkpoint.save_interval,
        exit_interval=training.exit_interval,
        exit_seconds=None if minutes is None else minutes * 60,
        log_params_norm=logging.log_params_norm,
        log_num_zeros=logging.log_num_zeros_in_grad,
        exact_timers=logging.log_timers_to_tensorboard,
    )


def optimizer_tensors(optimizer: Optimizer, *, moments: bool = True) -> dict[str, Tensor]:
    """The optimizer's tensors by checkpoint key: ``name/weight`` and, if wanted, ``name/exp_avg``, ..."""
    return {
        f"{spec.name}/{kind}": tensor
        for spec, state in optimizer.named_state()
        for kind, tensor in state.items()
        if moments or kind == "weight"
    }


def save_state(config: Config, engine: Engine, context: ParallelContext, state: TrainState) -> None:
    """Write a checkpoint to `--save`."""
    moments = not config.checkpoint.no_save_optim
    scaler = engine.scaler_state
    facts = {
        "config": config.model_dump(mode="json"),
        "state": vars(state),
        "scaler": vars(scaler) if moments else None,
        "updates": engine.optimizer.updates if moments else None,
        "stream_seed": config.training.seed,
    }
    snapshot = Snapshot(optimizer_tensors(engine.optimizer, moments=moments), facts)
    save_checkpoint(config.checkpoint.save, state.iteration, snapshot, context)


# What decides the learning rate after a resume; a silent change of these would bend the schedule.
SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_tokens",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_tokens",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)


def load_state(config: Config, engine: Engine, context: ParallelContext) -> tuple[TrainState, int]:
    """Resume from `--load`: where training stands, and the seed of the dropout streams.

    Raises:
        CheckpointError: the checkpoint is damaged, of another layout or model, or of another learning rate
            schedule without --override-opt_param-scheduler; or none is there and that was not allowed.
    """
    section = config.checkpoint
    fresh = TrainState(), config.training.seed
    if section.load is None:
        return fresh
    iteration = latest_iteration(section.load)
    if iteration is None:
        if section.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"`load` must hold a checkpoint, but {section.load} has none; check the path"
            )
        return fresh
    folder = iteration_folder(section.load, iteration)
    facts = read_facts(folder)
    with_moments = not (section.finetune or section.no_load_optim)
    if with_moments and facts["updates"] is None:
        raise CheckpointError(
            f"`{folder}` was saved without optimizer state; set --no-load-optim or --finetune"
        )
    if not section.finetune:
        _check_schedule(config, facts["config"], folder)
    read_tensors(folder, optimizer_tensors(engine.optimizer, moments=with_moments), context)
    engine.optimizer.publish()
    if with_moments:
        engine.optimizer.updates = facts["updates"]
        engine.scaler_state = ScalerState(**facts["scaler"])
    if section.finetune:
        return fresh
    return TrainState(**facts["state"]), fresh[1] if section.no_load_rng else facts["stream_seed"]


def _check_schedule(config: Config, saved: Mapping[str, Any], folder: Path) -> None:
    if config.checkpoint.override_opt_param_scheduler:
        return
    now, then = config.optimizer.model_dump(mode="json"), saved["optimizer"]
    changed = [
        f"{name}: {then.get(name)} -> {now[name]}" for name in SCHEDULE_FIELDS if then.get(name) != now[name]
    ]
    if changed:
        raise CheckpointError(
            f"`{folder}` was trained with another schedule ({'; '.join(changed)}); "
            f"set --override-opt_param-scheduler to use the new values"
        )


def load_for_inference(directory: str, launch: Launch) -> tuple[ParallelContext, GPT, Tokenizer, Config]:
    """The newest model of a checkpoint folder, ready to generate, on this rank of the job.

    Raises:
        CheckpointError: there is none, or it was written by another tensor-parallel size.
        ConfigError: the model was trained without a tokenizer.
    """
    iteration = latest_iteration(directory)
    if iteration is None:
        raise CheckpointError(f"`load` must hold a checkpoint, but {directory} has none; check the path")
    folder = iteration_folder(directory, iteration)
    config = Config.model_validate(read_facts(folder)["config"])
    # A sequence under generation is one token long and cannot be cut over ranks.
    parallel = config.parallel.model_copy(update={"sequence_parallel": False})
    config = config.model_copy(update={"parallel": parallel})
    vocabulary = build_vocabulary(config)
    if vocabulary.tokenizer is None:
        raise ConfigError(
            f"`tokenizer_type` must be known to generate text, but {folder} was trained without one"
        )
    context = join(config.parallel, launch)
    model = build_model(config, vocabulary, context)
    with torch.no_grad():
        weights = {f"{spec_of(p).name}/weight": p for p in model.parameters()}
        read_tensors(folder, weights, context)
    return context, model, vocabulary.tokenizer, config


def pretrain(config: Config, launch: Launch | None = None) -> TrainState:
    """Run a training as configured, on this rank of the job.

    Raises:
        MegazeroError: whatever of the user's to mend stands in the way.
    """
    keep_freed_memory()
    context = join(config.parallel, launch or Launch.from_environment())
    vocabulary = build_vocabulary(config)
    engine = build_engine(config, build_model(config, vocabulary, context), context)
    state, stream_seed = load_state(config, engine, context)
    feeds = build_feeds(config, vocabulary, context, stream_seed)
    plan = build_plan(config, vocabulary, context)
    monitor = build_monitors(config, context.rank == 0, state.iteration, plan.iterations)

    def save(state: TrainState) -> None:
        save_state(config, engine, context, state)

    loop = Loop(engine, plan, feeds, monitor, save if config.checkpoint.save else None, context)
    try:
        if config.training.skip_train:
            for split in ("validation", "test"):
                if (feeds.valid if split == "validation" else feeds.test) is not None:
                    loop.evaluate(split, state)
        else:
            state = loop.fit(state)
    finally:
        monitor.close()
        if feeds.train is not None:
            feeds.train.close()
    leave(context)
    return state
