"""Each flag of Megatron-LM is known, takes as many values as there, and gets an answer that fits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.compat.rows import SYNONYMS
from megazero.config.flags import FLAGS, scan
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from tests.config.compat.features import FEATURES
from tests.tables import over_table

ARITIES = dict(
    line.split()
    for line in Path(__file__).with_name("megatron_lm_flags.txt").read_text(encoding="utf-8").splitlines()
)
"""Flag -> how many values follow it: 0, 1, `?` (at most one) or `*`."""

# A pyramid is Megatron-DeepSpeed's; a window and a pattern of layers are one text there, and may be several
# numbers here.
LISTS_HERE = {
    *("--num-experts", "--num-moe-experts", "--moe-layer-freq"),
    *("--window-size", "--window-attn-skip-freq", "--step-batch-size-schedule"),
    "--no-rope-freq",
}


def ours(name: str) -> str:
    if name in FLAGS:
        flag = FLAGS[name]
        return "0" if flag.is_switch else "*" if flag.spec.is_list else "1"
    if name in SYNONYMS:
        values = (SYNONYMS[name][0].when.least, SYNONYMS[name][0].most)
    else:
        values = FOREIGN_FLAGS[name].arity
    return {(0, 0): "0", (1, 1): "1", (0, 1): "?"}.get(values, "*")


def test_the_list_is_whole() -> None:
    assert len(ARITIES) == 939


@over_table("name", ARITIES)
def test_each_takes_as_many_values_as_there(name: str) -> None:
    expected = "*" if name in LISTS_HERE else ARITIES[name]
    assert ours(name) == expected
    values = {"0": [], "1": ["1"], "?": ["1"], "*": ["1", "2", "3"]}[expected]
    problems = scan([name, *values, "--num-layers", "7"]).problems
    assert not any("unexpected" in each or "unknown" in each or "followed by" in each for each in problems)


@over_table("name", [name for name in ARITIES if ours(name) == "1"])
def test_a_value_must_follow(name: str) -> None:
    problems = scan([name, "--num-layers", "7"]).problems
    refused = name in FOREIGN_FLAGS and FOREIGN_FLAGS[name].accepted is None
    assert any("is not accepted" in each if refused else "followed by" in each for each in problems)


@over_table("name", [name for name, arity in ARITIES.items() if arity == "0"])
def test_a_switch_takes_no_value(name: str) -> None:
    assert any("unexpected argument `stray`" in each for each in scan([name, "stray"]).problems)


def test_what_is_absent_is_named() -> None:
    assert len(FEATURES) > 200
    assert all(FOREIGN_FLAGS[name].refused for name in FEATURES)


@over_table(
    ("argv", "says"),
    [
        (
            "--moe-router-dtype fp64",
            "`--moe-router-dtype fp64` is not accepted: routers always compute in fp32",
        ),
        ("--moe-latent-size 64", "experts of a narrower space are not built"),
        ("--moe-router-force-biased 0.5", "force an even choice with `--moe-router-force-load-balancing`"),
        (
            "--moe-router-load-balancing-type quantile_balancing",
            "(quantile_balancing is not offered; take --moe",
        ),
        ("--moe-router-score-function sqrtsoftplus", "(sqrtsoftplus is not offered), but is `sqrtsoftplus`."),
        ("--moe-apply-probs-on-input", "it would change the numbers"),
        (
            "--moe-router-topk-limited-devices 2",
            "use `--moe-router-num-groups` and `--moe-router-group-topk`",
        ),
        ("--moe-token-dropping", "use `--moe-expert-capacity-factor`"),
        ("--moe-upcycling-granularity 2", "each expert is a copy of the whole MLP; leave it out"),
        ("--moe-dispatch-fwd-dtype mxfp8", "rows are sent to experts in the model's type"),
        ("--fp4-format e2m1", "fp4, weights kept in fp8 and recipes of other projects are not offered"),
        ("--mamba-training-ssm-states-dtype bf16", "the states of state-space layers are always fp32"),
        ("--heterogeneous-block-specs", "are given by `--heterogeneous-layers-config-path` or `--heterog"),
        ("--mtp-detach-heads", "further tokens are predicted by a layer each, on the last stage"),
        ("--perform-rl-step", "policy gradients are trained by `megazero rl`"),
        ("--full-validation", "validation data are evaluated for `--eval-iters` batches"),
        ("--attention-backend cudnn", "`--attention-backend cudnn` is not accepted: choose auto"),
        ("--dist-ckpt-strictness lax", "choose raise_all or leave it out"),
        ("--rerun-mode report_stats", "choose validate_results or disabled"),
        ("--recompute-modules mhc", "(mhc belongs to hyper-connections, which are not built)"),
    ],
)
def test_refused_by_family(argv: str, says: str) -> None:
    problems = scan(argv.split()).problems
    assert len(problems) == 1
    assert says in problems[0]


def test_beside_a_file_that_is_not_read_nothing_is_missing() -> None:
    """Seven sentences on what must be set followed, of settings that the file has."""
    with pytest.raises(ConfigError) as caught:
        parse_config(["--yaml-cfg", "gpt.yaml", "--split", "949,50,1", "--eval-iters", "a"], world_size=4)
    assert caught.value.violations == [
        "`--yaml-cfg gpt.yaml` is not accepted: Megatron-LM's files of settings are not read; give the "
        "settings as flags, or by their names here in a file with `--config`.",
        "`--eval-iters` must be an integer, but is `a`.",
    ]


@over_table(
    "argv",
    [
        "--calculate-per-token-loss",  # the loss here is that mean, always
        "--attention-backend flash",
        "--dist-ckpt-strictness log_all",
        "--moe-enable-deepep",
        "--use-checkpoint-args",
        "--enable-ft-package",
        "--save-wgrads-interval 5",
        "--rerun-mode disabled",
        "--rerun-mode validate_results",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--moe-router-dtype fp32",
        "--moe-shared-expert-overlap",
        "--overlap-moe-expert-parallel-comm",
        "--moe-per-layer-logging",
        "--moe-flex-dispatcher-backend deepep",
        "--moe-upcycling-granularity 1",
        "--cache-mla-latents",
        "--fp8-interval 1",
    ],
)
def test_accepted_because_the_numbers_are_those_asked_for(argv: str) -> None:
    result = scan(argv.split())
    assert result.problems == []
    assert len(result.ignored) == 1


@over_table(
    ("argv", "path", "value"),
    [
        ("--deterministic-mode", "training.deterministic_mode", True),
        ("--add-qkv-bias", "model.add_qkv_bias", True),
        ("--moe-router-force-load-balancing", "model.moe_router_force_load_balancing", True),
        ("--moe-use-upcycling", "checkpoint.moe_use_upcycling", True),
        ("--most-recent-k 2", "checkpoint.keep_last", 2),
        ("--window-size (128,0)", "model.window_size", (128, 0)),
        ("--window-size -1,5", "model.window_size", (-1, 5)),
        ("--no-rope-freq ([0]*2+[1])*2", "model.no_rope_freq", (0, 0, 1, 0, 0, 1)),
        ("--no-rope-freq 3", "model.no_rope_freq", (3,)),
        ("--window-attn-skip-freq ([1]*2+[0])*2", "model.window_attn_skip_freq", (1, 1, 0, 1, 1, 0)),
        ("--softmax-type learnable", "model.softmax_type", "learnable"),
        ("--qk-layernorm", "model.qk_layernorm", True),
        ("--apply-layernorm-1p", "model.apply_layernorm_1p", True),
        ("--attention-output-gate", "model.attention_output_gate", True),
        ("--quick-geglu", "model.activation", "quick_geglu"),
        ("--gated-linear-unit", "model.activation", "geglu"),
        ("--recompute-modules moe_act layernorm", "recompute.modules", ("moe_act", "layernorm")),
        ("--exit-on-missing-checkpoint", "checkpoint.exit_on_missing_checkpoint", True),
    ],
)
def test_settings_of_ours(argv: str, path: str, value: object) -> None:
    result = scan(argv.split())
    assert (result.problems, result.ignored) == ([], [])
    assert [(each.spec.path, each.value) for each in result.settings] == [(path, value)]


@over_table(
    ("typed", "close"),
    [
        ("--moe-aux-loss-coef", "--moe-aux-loss-coeff"),
        ("--mtp-loss", "--mtp-loss-scaling-factor"),
        ("--router-aux-loss", None),
        ("--train-iter", "--train-iters"),
        ("--lr-warmpu-iters", "--lr-warmup-iters"),
        ("--num_layer", "--num-layers"),
    ],
)
def test_an_unknown_flag_gets_a_suggestion_only_if_it_is_near(typed: str, close: str | None) -> None:
    (problem,) = scan([typed, "1"]).problems
    assert problem.startswith(f"unknown flag `{typed}`")
    assert (f"did you mean `{close}`" in problem) if close else ("did you mean" not in problem)
