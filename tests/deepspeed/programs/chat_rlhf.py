"""DeepSpeed-Chat's three steps on a toy: imitation, a reward model on pairs, PPO with a hybrid engine.

Step 3 has its four models (actor, reference, critic, reward), its rewards with a KL penalty, its generalized
advantages and its clipped losses; the JSON is that which its `ds_utils.py` makes. Prints a line of JSON.
"""

import copy
import json

import deepspeed
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

WORDS, PROMPT, ANSWER, LIKED = 16, 3, 6, 7
KL, CLIP_REWARD, CLIP, CLIP_VALUE, GAMMA, LAM = 0.1, 5.0, 0.2, 0.2, 1.0, 0.95


def ds_config(stage, hybrid=False, lr=1e-3, inference_tp_size=1):
    """The settings of an engine, as DeepSpeed-Chat's functions for training and evaluation write them."""
    return {
        "train_batch_size": 8 * deepspeed.comm.get_world_size(),
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 10**6,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": hybrid,
            "max_out_tokens": PROMPT + ANSWER,
            "inference_tp_size": inference_tp_size,
            "release_inference_cache": True,
            "pin_parameters": False,  # --unpin_actor_parameters
            "tp_gather_partition_size": 8,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "torch_adam": True}},
    }


def llama(kind):
    """A small Llama."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes)
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = 0
    return kind(config)


class Values(torch.nn.Module):
    """A trunk with one number for each token: the reward model, and the critic."""

    def __init__(self):
        super().__init__()
        self.trunk, self.v_head = llama(LlamaModel), torch.nn.Linear(32, 1, bias=False)

    def forward(self, ids):
        return self.v_head(self.trunk(ids).last_hidden_state)[..., 0]


def engine_of(model, **settings):
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(**settings)
    )[0]


def pair_loss(chosen, rejected, tokens_chosen, tokens_rejected, ends):
    """Step 2: of each pair the mean over tokens from the first that differs to the longer end."""
    losses = []
    for pair, end in enumerate(ends):
        start = int((tokens_chosen[pair] != tokens_rejected[pair]).nonzero()[0])
        losses.append(-F.logsigmoid(chosen[pair, start:end] - rejected[pair, start:end]).mean())
    return torch.stack(losses).mean()


def log_probs(logits, ids):
    """Of each token but the first."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def token_rewards(score, logs, known, mask, start):
    """A KL penalty for each token, and behind the last one the clipped score."""
    rewards = -KL * (logs - known)
    ends = start + mask[:, start:].sum(1)
    for row, end in enumerate(ends):
        rewards[row, end - 1] += score[row].clamp(-CLIP_REWARD, CLIP_REWARD)
        rewards[row, end:] = 0
    return rewards


def advantages(values, rewards, start):
    """Generalized advantages (Schulman et al. 2016) from `start` on, and returns; values end in zeros."""
    last, found = 0.0, []
    for t in reversed(range(start, rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        last = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAM * last
        found.append(last)
    gains = torch.stack(found[::-1], 1)
    return gains.detach(), (gains + values[:, start:]).detach()


def actor_loss(logs, old, gains, mask):
    ratio = ((logs - old) * mask).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return (torch.maximum(-gains * ratio, -gains * clipped) * mask).sum() / mask.sum()


def critic_loss(values, old, returns, mask):
    near = torch.minimum(torch.maximum(values, old - CLIP_VALUE), old + CLIP_VALUE)
    worst = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * (worst * mask).sum() / mask.sum()


def prompts():
    return torch.randint(1, WORDS, (8, PROMPT))


def train(engine, loss):
    engine.backward(loss)
    engine.step()
    return loss.item()


def ppo(actor, reference, critic, reward):
    """One experience and one step on it; the mean score."""
    actor.eval()
    ids = actor.generate(prompts(), max_new_tokens=ANSWER, do_sample=True, use_cache=True)
    actor.train()
    start, mask = PROMPT - 1, torch.ones_like(ids)[:, 1:]
    with torch.no_grad():
        old, known = log_probs(actor(ids).logits, ids), log_probs(reference(ids).logits, ids)
        score, values = reward(ids)[:, -1], critic(ids)[:, :-1]
    rewards = token_rewards(score, old, known, mask, start)
    gains, returns = advantages(values, rewards, start)
    mask = mask[:, start:]
    logs = log_probs(actor(ids).logits, ids)[:, start:]
    train(actor, actor_loss(logs, old[:, start:], gains, mask))
    train(critic, critic_loss(critic(ids)[:, :-1][:, start:], values[:, start:], returns, mask))
    return score.mean().item()


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)  # the same weights on each rank
    actor, scorer = llama(LlamaForCausalLM), Values()
    torch.manual_seed(100 + deepspeed.comm.get_rank())  # other samples
    told = {"imitation": [], "accuracy": [], "score": []}
    step_1 = engine_of(actor, stage=2)
    for _ in range(20):
        ids = (prompts()[:, :1] + torch.arange(PROMPT + ANSWER)) % WORDS
        told["imitation"].append(train(step_1, step_1(input_ids=ids, labels=ids).loss))
    step_2 = engine_of(scorer, stage=3)
    for _ in range(30):
        start, answers = prompts(), torch.randint(1, WORDS, (2, 8, ANSWER))
        liked = torch.where(torch.rand(8, ANSWER) < 0.7, LIKED, answers[0])
        liked[:, 0] = LIKED
        answers[1][answers[1] == LIKED] = LIKED + 1
        chosen, rejected = torch.cat([start, liked], 1), torch.cat([start, answers[1]], 1)
        scores = step_2(torch.cat([chosen, rejected])).view(2, 8, -1)
        told["accuracy"].append((scores[0, :, -1] > scores[1, :, -1]).float().mean().item())
        train(step_2, pair_loss(*scores, chosen, rejected, [PROMPT + ANSWER] * 8))
    frozen = step_2.module_state_dict()
    rewarding, critic = Values(), Values()
    for model in (rewarding, critic):  # the critic begins as the reward model
        model.load_state_dict(frozen)
    reference = copy.deepcopy(actor).eval()
    step_3 = engine_of(actor, stage=3, hybrid=True, lr=3e-3)
    judge = engine_of(critic, stage=3, lr=3e-3)
    reward = engine_of(rewarding.eval(), stage=0)
    for _ in range(25):
        told["score"].append(ppo(step_3, reference, judge, reward))
    print("told:", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
