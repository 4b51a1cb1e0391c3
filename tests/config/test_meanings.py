"""Flags that mean what they mean in Megatron, and launch lines that both Megatrons accept.

Each case was once accepted with another meaning, or refused.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from megazero.config.help import meanings
from megazero.config.resolve import Resolved, parse_config
from megazero.config.training_plan import training_plan_of
from megazero.data.splits import parse_split
from megazero.errors import ConfigError
from megazero.optim.loss_scaler import StaticLossScaler, build_loss_scaler
from megazero.optim.schedule import build_learning_rate
from tests.config.samples import BASE_FLAGS, make_config
from tests.tables import over_table


def launch(flags: str, world_size: int = 1) -> Resolved:
    return parse_config([*BASE_FLAGS, *shlex.split(flags)], world_size=world_size)


def refusals(flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        launch(flags)
    return caught.value.violations


@over_table(
    ("flags", "activation"),
    [
        ("", "gelu"),
        # without a bias there is no fused bias and GELU, whose form is tanh, and torch's own is left
        ("--disable-bias-linear", "gelu_exact"),
        ("--disable-bias-linear --no-bias-gelu-fusion", "gelu_exact"),
        ("--disable-bias-linear --openai-gelu", "gelu"),
        ("--disable-bias-linear --activation gelu", "gelu"),
        ("--disable-bias-linear --swiglu", "swiglu"),
        ("--disable-bias-linear --squared-relu", "squared_relu"),
        ("--disable-bias-linear=false", "gelu"),
    ],
)
def test_gelu_without_biases_is_exact(flags: str, activation: str) -> None:
    assert launch(flags).config.model.activation == activation


def test_a_tree_without_biases_has_the_same_default() -> None:
    assert make_config({"model.add_bias_linear": False}).model.activation == "gelu_exact"
    explicit = {"model.add_bias_linear": False, "model.activation": "gelu"}
    assert make_config(explicit).model.activation == "gelu"


@over_table(
    ("flags", "expected"),
    [
        ("--activations-checkpoint-method uniform", ("full", "uniform", 1)),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            ("full", "block", 3),
        ),
        # what Megatron-LM has had instead since recomputes nothing without a granularity
        ("--recompute-method uniform", ("none", "uniform", 1)),
    ],
)
def test_megatron_2_recomputes_whole_layers_where_it_is_told_how(flags: str, expected: tuple) -> None:
    found = launch(flags).config.recompute
    assert (found.granularity, found.method, found.num_layers) == expected


@over_table(
    ("flags", "heads"),
    [
        ("--num-query-groups 2 --group-query-attention", 2),
        ("--group-query-attention --num-query-groups=2", 2),
        ("--group-query-attention --num-key-value-heads 2", 2),
        ("--num-key-value-heads 2", 2),
        ("--num-query-groups 4", 4),  # one for each query head, as without it
    ],
)
def test_query_groups_are_taken_in_silence(flags: str, heads: int) -> None:
    launched = launch(flags)
    assert (launched.config.model.kv_heads, launched.warnings) == (heads, ())


def test_query_groups_without_their_switch_are_another_model_than_megatron_lms() -> None:
    launched = launch("--num-query-groups 2")
    assert launched.config.model.kv_heads == 2
    assert launched.warnings == (
        "`--num-query-groups 2` gives the model 2 key/value heads. Megatron-LM ignores it without "
        "`--group-query-attention` and trains one for each query head; leave it out for that model.",
    )


def test_the_switch_of_query_groups_needs_their_number(tmp_path: Path) -> None:
    assert refusals("--group-query-attention") == [
        "`--group-query-attention` is not accepted: say how many key/value heads there are with "
        "`--num-query-groups`."
    ]
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_query_groups: 2}\n")
    assert launch(f"--group-query-attention --config {file}").warnings == ()


def test_openai_gelu_is_that_of_the_head_of_a_bert_too() -> None:
    model = launch("--openai-gelu").config.model
    assert (model.activation, model.bert_head_activation) == ("gelu", "gelu")


@pytest.mark.parametrize("window", [19, 10_001])
def test_a_window_of_spikes_has_bounds_with_a_reason(window: int) -> None:
    assert refusals(f"--spike-window {window}") == [
        "`--spike-window` must be from 20, the fewest updates whose median says what is usual, to 10000, but "
        f"is `{window}`."
    ]
    assert "from 20 to 10000" in meanings("guards")["spike_window"]


class _MegatronDeepSpeedRates:
    """Its scheduler with linear decay, walked step by step: warmup over samples, then decay over tokens.

    The tokens of the step at which the warmup's samples are reached are where the decay begins.
    """

    def __init__(self, peak: float, floor: float, warmup_samples: float, decay_tokens: int):
        self.peak, self.floor = peak, floor
        self.warmup_samples, self.decay_tokens = warmup_samples, decay_tokens
        self.begins: int | None = None

    def at(self, samples: int, tokens: int) -> float:
        if self.begins is None and samples <= self.warmup_samples:
            if samples == self.warmup_samples:
                self.begins = tokens
            return self.peak * samples / self.warmup_samples
        if tokens > self.decay_tokens:
            return self.floor
        assert self.begins is not None
        share = (tokens - self.begins) / (self.decay_tokens - self.begins)
        return self.floor + (1 - share) * (self.peak - self.floor)


@over_table(
    ("flags", "warmup_samples"),
    [
        ("--train-iters 100 --lr-warmup-iters 10", 10 * 8),
        ("--train-iters 100 --lr-warmup-fraction 0.2", 20 * 8),
        ("--train-samples 800 --lr-warmup-samples 80", 80),
        ("--train-samples 800 --lr-warmup-fraction 0.05", 40),
    ],
)
def test_decay_in_tokens_after_a_warmup_in_steps(flags: str, warmup_samples: int) -> None:
    flags += " --global-batch-size 8 --lr-decay-tokens 19200 --min-lr 1e-4"
    base = [flag for flag in BASE_FLAGS if flag not in ("--train-iters", "100")]
    config = parse_config([*base, *flags.split()], world_size=2).config
    training_plan = training_plan_of(config, 2)
    rates = build_learning_rate(config.optimizer, training_plan)
    theirs = _MegatronDeepSpeedRates(1e-3, 1e-4, warmup_samples, 19200)
    seen = []
    for iteration in range(training_plan.end.iteration):
        before = training_plan.before(iteration)
        seen.append(rates.at(before))
        assert math.isclose(seen[-1], theirs.at(before.samples, before.tokens), rel_tol=1e-12, abs_tol=1e-18)
    assert max(seen) == 1e-3
    assert seen[-1] == 1e-4


def test_a_fraction_beside_a_decay_in_tokens_is_one_of_the_training() -> None:
    """It was once one of the decay: here 1,920 tokens for 640."""
    config = launch("--lr-decay-tokens 19200 --lr-warmup-fraction 0.1").config
    lengths = training_plan_of(config, 1).lr
    assert (lengths.warmup_as_given.length, lengths.warmup_as_given.unit, lengths.warmup) == (
        10,
        "iters",
        10 * 2 * 32,
    )


@pytest.mark.parametrize("warmup", ["iters", "samples"])
def test_warmup_in_tokens_before_a_decay_in_steps_is_still_refused(warmup: str) -> None:
    line = refusals(f"--lr-warmup-tokens 64 --lr-decay-{warmup} 50")[0]
    assert line.endswith("[rule one_lr_unit].")


def test_warmup_in_tokens_alone_is_refused_with_both_meanings() -> None:
    assert refusals("--lr-warmup-tokens 64") == [
        "`lr_decay_tokens` must be set with `lr_warmup_tokens` unless the training's length is in tokens "
        "alone, but `lr_warmup_tokens` is 64 and `lr_decay_tokens` is not set; set it: without it the decay "
        "would be counted in tokens here, but in Megatron-DeepSpeed in samples, from the first step on "
        "[rule token_warmup_needs_token_decay]."
    ]


@over_table(
    ("flags", "note"),
    [
        ("--save-interval 10", "`save_interval` has no effect without `save`: nothing is saved."),
        (
            "--save-interval 10 --async-save --save-retain-interval 100",
            "`save_interval` and `save_retain_interval` and `async_save` have no effect without `save`: "
            "nothing is saved.",
        ),
        ("--no-load-optim", "`no_load_optim` has no effect without `load`: no checkpoint is read."),
        (
            "--no-load-optim --no-load-rng --finetune",
            "`finetune` and `no_load_optim` and `no_load_rng` have no effect without `load`: no checkpoint "
            "is read.",
        ),
        ("--ckpt-step 0", "`ckpt_step` has no effect without `load`: no checkpoint is read."),
        (
            "--log-timers-to-tensorboard",
            "`log_timers_to_tensorboard` has no effect without `tensorboard_dir`: there are no TensorBoard "
            "events.",
        ),
        (
            "--wandb-exp-name first",
            "`wandb_exp_name` has no effect without `wandb_project`: nothing goes to Weights & Biases.",
        ),
    ],
)
def test_what_has_no_effect_is_accepted_and_said(flags: str, note: str) -> None:
    assert launch(flags).warnings == (note,)


def test_what_has_its_effect_is_not_remarked_on() -> None:
    flags = "--save c --save-interval 10 --load c --no-load-optim --tensorboard-dir t --wandb-project p "
    assert launch(flags + "--log-timers-to-tensorboard --wandb-exp-name e --ckpt-step 0").warnings == ()


@over_table(
    ("flags", "last"),
    [
        ("", None),
        ("--save-retain-interval 100", 1),
        ("--save-retain-interval 100 --keep-last 3", 3),
        ("--keep-last 3", 3),
    ],
)
def test_retained_checkpoints_alone_are_kept_beside_the_newest(flags: str, last: int | None) -> None:
    """Megatron-LM removes all others but the last one as soon as the flag is given."""
    assert launch(f"--save c --save-interval 10 {flags}").config.checkpoint.kept_last == last


def test_bf16_takes_a_static_loss_scale() -> None:
    """Megatron-LM multiplies the loss by it and divides the gradients by it again, as with fp16."""
    precision = launch("--bf16 --loss-scale 4096").config.precision
    assert build_loss_scaler(precision) == StaticLossScaler(4096.0)
    # 0 is dynamic, as in both
    assert launch("--fp16 --loss-scale 0").config.precision.loss_scale is None
    assert refusals("--loss-scale 4096") == [
        "`dtype` must be fp16 or bf16 with `loss_scale` 4096.0, but `dtype` is fp32; add `--fp16` or "
        "`--bf16`, or leave `--loss-scale` out [rule needs_of_loss_scale]."
    ]


@over_table(
    ("written", "shares"),
    [
        ("98,2", (0.98, 0.02, 0)),
        ("100", (1, 0, 0)),
        ("'949,50,1'", (0.949, 0.05, 0.001)),
        ('"949,50,1"', (0.949, 0.05, 0.001)),
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("98/2/0", (0.98, 0.02, 0)),
        ("0,100", (0, 1, 0)),
    ],
)
def test_splits(written: str, shares: tuple[float, float, float]) -> None:
    config = parse_config([*BASE_FLAGS, "--split", written]).config
    assert parse_split(config.data.split) == pytest.approx(shares)


@over_table(
    ("name", "reason"),
    [
        ("TikTokenizer", "is not offered: save the vocabulary as a tokenizer.json and take HFTokenizer"),
        ("SFTTokenizer", "reads conversations, which `megazero data conversations` does beforehand"),
        ("MultimodalTokenizer", "belongs to vision models, which are not offered"),
        ("NullMultimodalTokenizer", "belongs to vision models, which are not offered"),
    ],
)
def test_tokenizers_that_are_not_offered_are_refused_with_the_reason(name: str, reason: str) -> None:
    (line,) = refusals(f"--tokenizer-type {name}")
    assert line.startswith("`--tokenizer-type` must be one of GPT2BPETokenizer, HFTokenizer, ")
    assert line.endswith(f" ({name} {reason}), but is `{name}`.")


def test_todays_name_of_the_hugging_face_tokenizer() -> None:
    old, new = (
        launch(f"--tokenizer-type {name} --tokenizer-model t").config
        for name in ("HFTokenizer", "HuggingFaceTokenizer")
    )
    assert old == new
