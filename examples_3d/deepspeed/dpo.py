"""Preferences without a reward model: a policy that is trained and its frozen copy, an engine for each."""

import copy

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

WORDS, LENGTH = 24, 8
BASE = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


class Language(nn.Module):
    """Guesses the next word from the current one."""

    def __init__(self, hidden=12):
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, words):
        return self.head(torch.tanh(self.mix(self.words(words))))


def log_probability(engine, words):
    """Of each sequence, given its first word."""
    found = F.log_softmax(engine(words[:, :-1]), -1)
    return found.gather(-1, words[:, 1:, None]).squeeze(-1).sum(-1)


if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Language()
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=BASE)
    reference, *_ = deepspeed.initialize(model=frozen, config=BASE)
    draw, losses, beta = torch.Generator().manual_seed(6), [], 0.5
    for _ in range(15):
        start = torch.randint(WORDS, (4, 1), generator=draw)
        chosen = ((start + torch.arange(LENGTH)) % WORDS).to(policy.device)
        rejected = torch.randint(WORDS, (4, LENGTH), generator=draw).to(policy.device)
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            before = log_probability(reference, both)
        gain = log_probability(policy, both) - before
        better, worse = gain.chunk(2)
        loss = -F.logsigmoid(beta * (better - worse)).mean()
        policy.backward(loss)
        policy.step()
        losses.append(loss.item())
    print("norm:", policy.get_global_grad_norm(), "losses:", losses)
