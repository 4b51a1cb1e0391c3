"""Rules about policy gradients: what is answered, what rewards it, and how answers fill updates."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, rule

_BATCH, _CHECKPOINT, _MODEL, _POLICY = paths.batch, paths.checkpoint, paths.model, paths.policy


def _answers(case: Case) -> bool:
    return case.config.policy.policy_method is not None


@rule((_POLICY.prompts,), "add `--prompts FILE`", where=_answers)
def prompts_are_given(case: Case) -> bool:
    """`prompts` must name a file with `policy_method`"""
    return bool(case.config.policy.prompts)


@rule(
    (_POLICY.reward_functions, _POLICY.reward_model),
    "add `--reward-functions file.py:function` or `--reward-model FOLDER`",
    where=_answers,
)
def rewards_are_given(case: Case) -> bool:
    """`reward_functions` must name a function with `policy_method`, unless `reward_model` names a folder"""
    return bool(case.config.policy.reward_functions or case.config.policy.reward_model)


@rule(
    (_POLICY.reward_weights, _POLICY.reward_functions, _POLICY.reward_model),
    "give one for each function, and one for the model",
    where=_answers,
)
def each_reward_has_a_weight(case: Case) -> bool:
    """`reward_weights` must be as many as `reward_functions`, and one more with `reward_model`"""
    policy = case.config.policy
    rewards = len(policy.reward_functions) + (policy.reward_model is not None)
    return len(policy.reward_weights) in (0, rewards)


@rule(
    (_BATCH.global_batch_size, _POLICY.group_size, _POLICY.prompts_per_rollout),
    "choose prompts x group size as a multiple of the global batch",
    where=_answers,
)
def updates_fill_a_rollout(case: Case) -> bool:
    """`prompts_per_rollout` x `group_size` must be a multiple of `global_batch_size`; without
    `prompts_per_rollout`, `global_batch_size` must be a multiple of `group_size`"""
    policy, batch = case.config.policy, case.config.batch.global_batch_size
    if batch is None:
        return False
    if policy.prompts_per_rollout is None:
        return batch % policy.group_size == 0
    return policy.prompts_per_rollout * policy.group_size % batch == 0


@rule((_POLICY.max_answer_tokens, _MODEL.seq_length), "shorten the answers", where=_answers)
def answers_leave_room_for_prompts(case: Case) -> bool:
    """`max_answer_tokens` must be less than `seq_length`, which prompt and answer share"""
    return case.config.policy.max_answer_tokens < case.model.seq_length


@rule(
    (_POLICY.kl_coef, _POLICY.reference, _CHECKPOINT.load_hf),
    "name its folder by `--reference`",
    where=_answers,
)
def divergence_has_a_reference(case: Case) -> bool:
    """`reference` must be set with `kl_coef`, unless `load_hf` is"""
    policy = case.config.policy
    return policy.kl_coef is None or bool(policy.reference or case.config.checkpoint.load_hf)
