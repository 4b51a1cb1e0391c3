"""The section `policy`: policy gradients on a model's own answers, as `megazero rl` trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

MethodName = Literal["grpo", "dr-grpo", "dapo", "rloo", "gspo"]
Advantage = Literal["group-std", "group-mean", "batch-std", "leave-one-out"]
RatioLevel = Literal["token", "sequence", "sequence-sum"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]


class PolicyConfig(Section):
    """Policy gradients"""

    needs = here.policy_method.because("the other settings of a policy say how it trains")

    policy_method: MethodName | None = option(
        None,
        needs=(
            config.model.family == "gpt",
            config.finetune.task.is_none,
            config.distillation.kd.is_off,
            config.model.num_classes.is_none,
            config.model.mtp_num_layers.is_none.because("answers are drawn token by token"),
            config.model.moe_expert_capacity_factor.is_none.because(
                "what is drawn token by token drops no token"
            ),
            (config.curriculum.seqlen_schedule == "none").because("answers have lengths of their own"),
            config.skipping.random_ltd.is_off.because("answers are drawn by all layers"),
            config.skipping.progressive_layer_drop.is_off.because("answers are drawn by all layers"),
            config.batch.rampup_batch_size.is_none.because("a rollout is a whole number of updates"),
            config.acceleration.compile.is_off.because("what is compiled computes in another order"),
            config.acceleration.cuda_graph.is_off.because("answers are drawn without graphs"),
            config.guards.on_spike.among("off", "warn", "skip").because("a rollout is not made again"),
            config.guards.on_weights_differ.among("stop", "majority").because("a rollout is not made again"),
        ),
    )
    """what `megazero rl` trains by; each setting below whose default is the method's may be set by itself"""
    prompts: tuple[str, ...] = option((), roles=Role.FILE)
    """files of prompts: JSONL or Parquet with `prompt`, text or messages, and columns for reward functions"""
    reward_functions: tuple[str, ...] = option(())
    """Python functions as module:function or file.py:function, called as in TRL: (prompts, completions,
    completion_ids, **columns) -> a list of numbers, None where one does not apply"""
    reward_model: str | None = option(None)
    """folder of a reward model: a run, one checkpoint, or Hugging Face's; its score is one more reward"""
    reward_weights: tuple[float, ...] = option(())
    """weight of each reward function in the sum, and then of the reward model; default: 1 each"""
    reward_timeout: PositiveFloat = option(60.0, unit="seconds")
    """the longest that a reward function may take for a replica's answers; they then have no reward by it"""
    group_size: Annotated[int, Field(ge=2)] = option(8, roles=Role.SCHEDULE)
    """answers to each prompt, which are compared with each other"""
    prompts_per_rollout: PositiveInt | None = option(None, roles=Role.SCHEDULE)
    """prompts answered at a time with the same weights; default: as many as one update trains on"""
    rollout_iterations: PositiveInt = option(1, roles=Role.SCHEDULE)
    """times that the answers of a rollout are trained on"""
    max_answer_tokens: PositiveInt = option(256)
    """the most tokens of an answer; a longer one is cut"""
    rollout_temperature: PositiveFloat = option(1.0)
    """divides the logits that answers are drawn from, and those that are trained"""
    rollout_top_k: NonNegativeInt = option(0)
    """draw among this many likeliest tokens, and train on the same; 0 for all"""
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = option(1.0)
    """draw among the likeliest tokens with this probability together, and train on the same"""
    rollout_min_p: Annotated[float, Field(ge=0, le=1)] = option(0.0)
    """draw among tokens with this share of the likeliest one's probability, and train on the same"""
    advantage: Advantage | None = option(None)
    """reward of an answer less the mean of its group: divided by the group's standard deviation, by nothing,
    by that of the whole rollout; or less the mean of the others; default: the method's"""
    ratio_level: RatioLevel | None = option(None)
    """ratio of new to old probability: of each token, of a whole answer as the mean over its tokens, or as
    their product; default: the method's"""
    clip_low: NonNegativeFloat | None = option(None)
    """how far below 1 a ratio still counts; default: the method's"""
    clip_high: NonNegativeFloat | None = option(None)
    """how far above 1 a ratio still counts; default: the method's"""
    dual_clip: Annotated[float, Field(gt=1)] | None = option(None)
    """bound of the loss of a bad answer, as a multiple of its advantage; default: none"""
    aggregation: Aggregation | None = option(None)
    """mean over the tokens of the step, over its answers' means, or over their sums divided by
    `max_answer_tokens`; default: the method's"""
    drop_equal_groups: bool | None = option(None)
    """leave out groups whose rewards are all equal, which teach nothing; default: the method's"""
    resample_rounds: NonNegativeInt = option(0)
    """while groups have equal rewards, answer further prompts instead of theirs, at most so many times (the
    dynamic sampling of DAPO)"""
    mask_truncated: bool = option(False)
    """leave answers that were cut out of the loss"""
    kl_coef: PositiveFloat | None = option(None)
    """weight of the divergence from the reference; default: there is no reference"""
    kl_estimator: KlEstimator = option("k3", needs=(here.policy_method, here.kl_coef))
    """with d the log-ratio to the reference: d, d^2/2, or e^-d + d - 1"""
    kl_in: Literal["loss", "reward"] = option("loss", needs=(here.policy_method, here.kl_coef))
    """where the divergence is added: to each token's loss, or, as the sum of d, to an answer's reward"""
    reference: str | None = option(None, needs=(here.policy_method, here.kl_coef))
    """folder of the reference: a run, one checkpoint, or one of Hugging Face; default: `--load-hf`"""
    check_rollout: Literal["error", "warn", "off"] = option("error")
    """compare the log-probabilities of a rollout with those of its first update: end with an error where a
    token's differ by more than `rollout_tolerance`, or report it"""
    rollout_tolerance: PositiveFloat | None = option(None)
    """for log-probabilities below -1 as a share of them; default: 2e-6 in fp32, 2e-5 with tensor parallelism,
    1e-3 in bf16; times 1,000 where products are not batch-invariant"""
    batch_invariant: bool | None = option(None)
    """compute products so that a token's log-probability does not depend on what is computed beside it;
    default: on a CPU that has the compiled kernels"""
