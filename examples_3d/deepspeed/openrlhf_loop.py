"""Actor and critic in turns, in the style of OpenRLHF: states sleep on the host while the other one works."""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import nn

STATES = [
    OffloadStateTypeEnum.optim_states,
    OffloadStateTypeEnum.contiguous_grad_buffer,
    OffloadStateTypeEnum.hp_params,
]
WORDS, LENGTH = 16, 6
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": False},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Network(nn.Module):
    """A recurrent network over words, with any number of outputs for each."""

    def __init__(self, out, hidden=16):
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, hidden), nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, out)

    def forward(self, words):
        x = self.words(words)
        state, found = torch.zeros_like(x[:, 0]), []
        for step in range(words.shape[1]):
            state = torch.tanh(self.cell(torch.cat([x[:, step], state], -1)))
            found.append(state)
        return self.out(torch.stack(found, 1))


def sleep(engine):
    """Move what only training needs to the host."""
    engine.offload_states(include=STATES, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=False)
    deepspeed.comm.barrier()


def wake(engine):
    """Bring it back."""
    engine.reload_states(non_blocking=False)
    deepspeed.comm.barrier()


def chosen(logits, words):
    """Log-probabilities of the words that follow."""
    return F.log_softmax(logits[:, :-1], -1).gather(-1, words[:, 1:, None]).squeeze(-1)


if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(0)
    actor, *_ = deepspeed.initialize(model=Network(WORDS), config=CONFIG)
    critic, *_ = deepspeed.initialize(model=Network(1), config=CONFIG)
    sleep(actor), sleep(critic)
    losses = []
    for _ in range(24):
        words = torch.arange(8, device=actor.device)[:, None]
        with torch.no_grad():  # greedy texts; a reward for each word that repeats the one before
            while words.shape[1] < LENGTH:
                words = torch.cat([words, actor(words)[:, -1:].argmax(-1)], 1)
            before, values = chosen(actor(words), words), critic(words)[:, :-1, 0]
        rewards = (words[:, 1:] == words[:, :-1]).float()
        advantages = rewards - values
        wake(critic)
        value_loss = F.mse_loss(critic(words)[:, :-1, 0], rewards)
        critic.backward(value_loss), critic.step(), sleep(critic)
        wake(actor)
        ratio = (chosen(actor(words), words) - before).exp()
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        actor.backward(policy_loss), actor.step(), sleep(actor)
        losses.append(value_loss.item())
    print("reward:", rewards.mean().item(), "losses:", losses)
