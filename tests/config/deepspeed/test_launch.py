"""A training script with a DeepSpeed JSON: precedence, conflicts, batch sizes, broken files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.config.resolve import Resolved, parse_config
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS

Launch = Callable[..., Resolved]
NO_BATCH = [flag for flag in BASE_FLAGS if flag not in ("--micro-batch-size", "2")]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs parse_config in a folder with the JSON as ds.json."""
    monkeypatch.chdir(tmp_path)

    def run(document: Any, *flags: str, base: list[str] = BASE_FLAGS, ranks: int = 4) -> Resolved:
        text = document if isinstance(document, str) else json.dumps(document)
        Path("ds.json").write_text(text)
        argv = [*base, "--deepspeed", "--deepspeed_config", "ds.json", *flags]
        return parse_config(argv, world_size=ranks)

    return run


def refusals(launch: Launch, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        launch(*args, **kwargs)
    return caught.value.violations


def test_the_json_stands_between_yaml_and_flags(launch: Launch) -> None:
    Path("run.yaml").write_text(
        "zero: {stage: 1, bucket_size: 7}\noptimizer: {clip_grad: 3}\nprecision: {initial_loss_scale: 8}\n"
    )
    document = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "fp16": {"enabled": True}}
    for flags in ([], ["--zero-stage", "2", "--clip-grad", "0.5"]):
        config = launch(document, "--config", "run.yaml", *flags).config
        assert (config.zero.stage, config.zero.bucket_size, config.optimizer.clip_grad) == (2, 7, 0.5)
        assert config.precision.dtype == "fp16"
        assert config.precision.initial_loss_scale == 8  # what the JSON only implies gives way
    assert launch(document).config.precision.initial_loss_scale == 2.0**16
    assert launch(document, "--initial-loss-scale", "4").config.precision.initial_loss_scale == 4


def test_auto_gives_way_to_a_flag_and_takes_the_hidden_size(launch: Launch) -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config = launch({"zero_optimization": zero}, "--bucket-size", "5").config
    assert (config.zero.bucket_size, config.zero.param_persistence_threshold) == (5, 640)


def test_every_conflict_with_a_flag_is_listed(launch: Launch) -> None:
    document = {
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
        "gradient_clipping": 1.0,
    }
    flags = "--zero-stage 1 --bf16 --clip-grad 1 --hysteresis 3 --overlap-grad-reduce"
    assert refusals(launch, document, *shlex.split(flags)) == [
        "`precision.dtype` must be set one way, but `--bf16` says bf16 and ds.json: `fp16.enabled` says "
        "fp16; change one of them.",
        "`precision.hysteresis` must be set one way, but `--hysteresis` says 3 and ds.json: "
        "`fp16.hysteresis` says 2; change one of them.",
        "`zero.stage` must be set one way, but `--zero-stage` says 1 and ds.json: `zero_optimization.stage` "
        "says 2; change one of them.",
        "`zero.overlap_grad_reduce` must be set one way, but `--overlap-grad-reduce` says true and ds.json: "
        "`zero_optimization.overlap_comm` says false; change one of them.",
    ]
    (loss_scale,) = refusals(launch, {"fp16": {"enabled": True, "loss_scale": 128}}, "--loss-scale", "12")
    assert "`--loss-scale` says 12.0 and ds.json: `fp16.loss_scale` says 128.0" in loss_scale


SIZES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
STEPS = {"gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("document", "flags", "sizes", "said"),
    [
        (SIZES, "--micro-batch-size 4 --global-batch-size 64", (4, 64), []),
        (
            SIZES,
            "--global-batch-size 32",
            (4, 32),
            ["`--global-batch-size` 32 takes precedence over 64 of ds.json: `train_batch_size`."],
        ),
        (
            SIZES,
            "--micro-batch-size 2 --global-batch-size 32",
            (2, 32),
            [
                "`--global-batch-size` 32 takes precedence over 64 of ds.json: `train_batch_size`.",
                "`--micro-batch-size` 2 takes precedence over 4 of ds.json: "
                "`train_micro_batch_size_per_gpu`.",
            ],
        ),
        (
            {**SIZES, **STEPS},
            "--micro-batch-size 2",
            (2, 64),
            [
                "`--micro-batch-size` 2 takes precedence over 4 of ds.json: "
                "`train_micro_batch_size_per_gpu`.",
                "`--micro-batch-size` 2 takes precedence over 4 of ds.json: `gradient_accumulation_steps`.",
            ],
        ),
        (
            STEPS,
            "--micro-batch-size 2 --global-batch-size 8",
            (2, 8),
            ["`--micro-batch-size` 2 takes precedence over 4 of ds.json: `gradient_accumulation_steps`."],
        ),
        ({**SIZES, **STEPS}, "--micro-batch-size 4", (4, 64), []),
        ({**SIZES, "train_batch_size": "auto"}, "--global-batch-size 32", (4, 32), []),
    ],
)
def test_a_batch_size_of_a_flag_takes_precedence(
    launch: Launch, document: dict[str, Any], flags: str, sizes: tuple[int, int], said: list[str]
) -> None:
    resolved = launch(document, *flags.split(), base=NO_BATCH)
    batch = resolved.config.batch
    assert (batch.micro_batch_size, batch.global_batch_size, list(resolved.warnings)) == (*sizes, said)


def test_a_learning_rate_and_a_folder_of_a_flag_take_precedence(launch: Launch) -> None:
    document = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "a"},
    }
    resolved = launch(document, "--tensorboard-dir", "events")
    assert (resolved.config.optimizer.lr, resolved.config.logging.tensorboard_dir) == (1e-3, "events")
    rate, folder = resolved.warnings
    assert rate == "`--lr` 0.001 takes precedence over 0.0001 of ds.json: `optimizer.params.lr`."
    assert folder.startswith("`--tensorboard-dir` events takes precedence over runs/a of ds.json: ")
    document["optimizer"]["params"]["lr"] = 1e-3
    assert len(launch(document, "--tensorboard-dir", "runs/a").warnings) == 0


def test_a_loss_scale_has_no_effect_beside_bf16_in_the_json(launch: Launch) -> None:
    resolved = launch({"bf16": {"enabled": True}}, "--bf16", "--loss-scale", "12")
    assert (resolved.config.precision.dtype, resolved.config.precision.loss_scale) == ("bf16", None)
    assert resolved.warnings == (
        "`--loss-scale 12` has no effect beside `bf16.enabled` of ds.json, as in Megatron-DeepSpeed: a loss "
        "in bf16 is not scaled.",
    )


def test_fp16_has_no_effect_beside_bf16_in_the_json(launch: Launch) -> None:
    """Megatron-DeepSpeed's offload example gives both, and trains in bf16: the engine casts the model."""
    resolved = launch({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "--fp16")
    assert (resolved.config.precision.dtype, resolved.config.precision.initial_loss_scale) == ("bf16", 2**32)
    assert resolved.warnings[-1] == (
        "`--fp16` has no effect beside `bf16.enabled` of ds.json, as in Megatron-DeepSpeed: the model is "
        "cast to the type of the JSON. Leave the flag out."
    )
    (refusal,) = refusals(launch, {"fp16": {"enabled": False}}, "--fp16")  # DeepSpeed stops there, too
    assert "`--fp16` says fp16 and ds.json: `fp16.enabled` says fp32" in refusal


@pytest.mark.parametrize("dynamic", [{}, {"loss_scale": 0}])
def test_the_json_alone_says_how_the_loss_is_scaled(launch: Launch, dynamic: dict[str, int]) -> None:
    """Megatron-DeepSpeed's scripts pass `--loss-scale 15` beside `initial_scale_power` 15, for 2^15.

    The flag once set a static scale of 15.
    """
    document = {"fp16": {"enabled": True, "initial_scale_power": 15, **dynamic}}
    resolved = launch(document, "--fp16", "--loss-scale", "15")
    assert resolved.config.precision.loss_scale is None
    assert resolved.config.precision.initial_loss_scale == 32768
    assert resolved.warnings == (
        "`--loss-scale 15` has no effect beside `fp16.enabled` of ds.json, as in Megatron-DeepSpeed: the "
        "loss "
        "scale is dynamic and starts at 32768; a static one is set by `fp16.loss_scale` there.",
    )
    static = launch({"fp16": {"enabled": True, "loss_scale": 128}}, "--loss-scale", "128")
    assert (static.config.precision.loss_scale, static.warnings) == (128, ())
    # without fp16 in the JSON the flag is Megatron's own
    assert launch({}, "--fp16", "--loss-scale", "128").config.precision.loss_scale == 128


def test_keys_that_others_turn_off_are_named(launch: Launch) -> None:
    """They were once dropped without a word."""
    document = {
        "optimizer": {"params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "scheduler": {"params": {"warmup_num_steps": 5}},
        "fp16": {"enabled": False, "loss_scale": 128},
        "tensorboard": {"output_path": "runs"},
        "bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True},
    }
    assert launch(document).warnings == (
        "keys of ds.json without effect here: optimizer.params.lr, optimizer.params.betas "
        "(`optimizer.type` is "
        "missing); scheduler.params (`scheduler.type` is missing); fp16.loss_scale "
        "(`fp16.enabled` is false); bf16.bf16_master_weights_and_grads (`bf16.enabled` is auto, and nothing "
        "turns it on); tensorboard.output_path (`tensorboard.enabled` is missing).",
    )


@pytest.mark.parametrize(
    ("document", "flags", "sizes"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "", (4, 64)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, "", (8, 64)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, "", (4, 32)),
        ({"train_batch_size": 64}, "", (16, 64)),
        ({"train_micro_batch_size_per_gpu": 4}, "", (4, 16)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, "--micro-batch-size 2", (2, 64)),
        ({"gradient_accumulation_steps": 3}, "--micro-batch-size 2", (2, 24)),
        ({"gradient_accumulation_steps": 3}, "--global-batch-size 24", (2, 24)),
        ({"gradient_accumulation_steps": "auto"}, "--micro-batch-size 2 --global-batch-size 48", (2, 48)),
        ({"train_batch_size": 64}, "--tensor-model-parallel-size 2", (32, 64)),
        ({"train_batch_size": 64}, "--pipeline-model-parallel-size 2 --micro-batch-size 4", (4, 64)),
    ],
)
def test_batch_sizes(launch: Launch, document: dict[str, Any], flags: str, sizes: tuple[int, int]) -> None:
    config: Config = launch(document, *flags.split(), base=NO_BATCH).config
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == sizes


def test_batch_sizes_that_contradict_the_number_of_ranks(launch: Launch) -> None:
    document = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    assert refusals(launch, document, base=NO_BATCH) == [
        "ds.json: `train_batch_size` must be micro-batch size x accumulation steps x data-parallel ranks, "
        "but 64 is not 2 x 4 x 4 = 32; leave one of the three out."
    ]
    assert launch(document, ranks=8).config.batch.global_batch_size == 64
    assert any(
        "world_size_factors" in line for line in refusals(launch, document, "--context-parallel-size", "3")
    )


def test_values_out_of_range_and_rules_name_their_source(launch: Launch) -> None:
    document = {"zero_optimization": {"stage": 4, "reduce_bucket_size": 0}}
    assert refusals(launch, document) == [
        "ds.json: `zero_optimization.stage`: `zero.stage` must be 0, 1, 2 or 3, but is `4`.",
        "ds.json: `zero_optimization.reduce_bucket_size`: `zero.bucket_size` must be greater than 0, but is "
        "`0`.",
    ]
    (rule,) = refusals(launch, {"activation_checkpointing": {"partition_activations": True}})
    assert rule.endswith("[rule needs_of_partition_activations].")


def test_a_schedule_of_the_json_is_refused_in_a_script(launch: Launch) -> None:
    assert refusals(launch, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}) == [
        "ds.json: `scheduler.type` is not accepted: a training script takes its schedule from flags; remove "
        "the section and give `--lr-decay-style`, `--lr-warmup-iters` and `--lr-decay-iters`."
    ]


def test_what_has_no_effect_is_named_in_one_warning(launch: Launch) -> None:
    document = {
        "steps_per_print": 5,
        "aio": {"single_submit": True},
        "zero_optimization": {"contiguous_gradients": True, "reduce_scatter": True},
    }
    assert launch(document, "--no-pipeline-parallel").warnings == (
        "flags without effect here: --no-pipeline-parallel (there is one engine, with and without pipeline "
        "stages).",
        "keys of ds.json without effect here: zero_optimization.contiguous_gradients, "
        "zero_optimization.reduce_scatter (gradients are always kept in flat buffers, and are "
        "reduce-scattered wherever they are sharded); aio.single_submit (requests are started one by "
        "one, and always overlap); steps_per_print (`--log-interval` says how often a line is printed).",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"seed": 1, "seed": 2}', "ds.json:1:13: `seed` must be given once, but is given on line 1 too."),
        ('{"fp16": {"enabled": true, "enabled": true}}', "ds.json:1:28: `enabled` must be given once"),
        (
            '{"train_batch_size": GBSIZE}',
            "but `GBSIZE` is a placeholder or has no quotes; write the value itself.",
        ),
        ('{"gradient_clipping": NaN}', "NaN is no number there"),
        ("[]", "ds.json: the file must hold one JSON object."),
        ("", "ds.json:1:1: the file must be valid JSON, but it is empty"),
        ("[" * 100_000, "ds.json: the file must not be nested this deeply."),
        ('{"a":' * 900 + "1" + "}" * 900, "ds.json: the file must not be nested this deeply."),
        ('{"aio": ' + "[" * 900 + "]" * 900 + "}", "ds.json: the file must not be nested this deeply."),
        (
            '{"compression_training": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
            "ds.json: the file must not be nested this deeply.",
        ),
        (
            '{"train_batch_size": 1e30}',
            '`train_batch_size` must be a positive integer of at most 64 bits or "auto", but is 1e+30.',
        ),
        (
            '{"train_batch_size": 1' + "0" * 400 + "}",
            '`train_batch_size` must be a positive integer of at most 64 bits or "auto", but is an integer '
            "of "
            "1329 bits.",
        ),
        (
            '{"gradient_clipping": 1e999}',
            '`gradient_clipping` must be a number, at least 0, that a float can hold or "auto", but is '
            "Infinity.",
        ),
        (
            '{"gradient_clipping": 1' + "0" * 400 + "}",
            'must be a number, at least 0, that a float can hold or "auto", but is an integer of 1329 bits.',
        ),
        ('{"gradient_clipping": 1' + "0" * 9000 + "}", "but a number has too many digits"),
    ],
)
def test_broken_files(launch: Launch, text: str, says: str) -> None:
    (problem,) = refusals(launch, text)
    assert says in problem


def test_a_file_that_is_not_there(launch: Launch) -> None:
    argv = [*BASE_FLAGS, "--deepspeed", "--deepspeed-config=nowhere.json"]
    with pytest.raises(ConfigError, match=r"must name a readable file, but nowhere\.json: No such file"):
        parse_config(argv)


def test_a_script_of_megatron_deepspeed_runs_unchanged(launch: Launch) -> None:
    """The JSON of its 1.3B GPT example after `sed`, with the flags that the script derives from the same."""
    document = {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 11,
        },
        "bf16": {"enabled": False},
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
        "wall_clock_breakdown": False,
    }
    flags = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --lr 2.0e-4
        --min-lr 2.0e-5 --max-position-embeddings 2048 --train-tokens 300000000000 --micro-batch-size 4
        --global-batch-size 512 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
        --clip-grad 1.0 --hysteresis 2 --fp16 --zero-stage 1 --tokenizer-type GPT2BPETokenizer
        --vocab-file v --merge-file m --data-path d --checkpoint-activations
        --deepspeed-activation-checkpointing --local_rank 0 --DDP-impl local"""
    resolved = launch(document, base=shlex.split(flags), ranks=64)
    assert resolved.config.zero.stage == 1
    assert resolved.config.precision.initial_loss_scale == 2048
    assert resolved.config.batch.global_batch_size == 512
    assert len(resolved.warnings) == 2


def test_intervals_that_no_run_reaches(launch: Launch) -> None:
    document = {"steps_per_print": 10**23, "fp16": {"enabled": True, "loss_scale_window": 1e30}}
    assert launch(document).config.precision.loss_scale_window == 2**63 - 1
    (problem,) = refusals(launch, {"steps_per_print": 1.5})
    assert problem == "ds.json: `steps_per_print` must be a positive integer, or null for never, but is 1.5."


def test_what_an_engine_alone_takes_is_refused_unless_it_asks_for_nothing(launch: Launch) -> None:
    pruning = {"sparse_pruning": {"shared_parameters": {"enabled": True}}}
    asked: dict[str, Any] = {
        "compression_training": (pruning, {"sparse_pruning": {"shared_parameters": {"enabled": False}}}),
        "managed_gradient_accumulation": (False, True),
        "data_parallel_size": (2, 1),
    }
    for key, (value, nothing) in asked.items():
        (problem,) = refusals(launch, {key: value})
        assert problem.startswith(f"ds.json: `{key}` is not accepted: ")
        assert launch({key: nothing}).warnings == ()


def test_ranks_that_share_sequences_send_heads(launch: Launch) -> None:
    """Samples of a rank count what the sharers leave of the ranks; a flag may not say another number."""
    document = {"sequence_parallel_size": 2, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    config = launch(document).config
    assert (config.parallel.context_parallel_size, config.parallel.cp_comm_type) == (2, ("a2a",))
    assert config.batch.global_batch_size == 8
    (problem,) = refusals(launch, document, "--context-parallel-size", "4")
    assert "must be set one way, but `--context-parallel-size` says 4 and ds.json" in problem
    assert launch({"sequence_parallel_size": 1}).config.parallel.context_parallel_size == 1
