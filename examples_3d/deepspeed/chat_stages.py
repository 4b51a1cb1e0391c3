"""The three stages of a chat model: imitation, a reward model, and PPO with an actor and a critic."""

import copy

import deepspeed
import torch
from torch import nn

WORDS, PROMPT, LENGTH = 12, 3, 8


class Trunk(nn.Module):
    """A causal transformer with one linear layer on top."""

    def __init__(self, out):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, out)

    def forward(self, ids):
        mask = torch.triu(torch.full((ids.shape[1],) * 2, float("-inf")), 1)
        return self.head(self.layer(self.words(ids) + self.places.weight[: ids.shape[1]], src_mask=mask))


def engine_of(model, stage):
    """The same settings for every model."""
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, loss):
    engine.backward(loss)
    engine.step()
    return loss.item()


def logprobs(model, ids):
    """The log-probabilities of the responses' tokens."""
    scores = model(ids[:, :-1]).log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[:, PROMPT - 1 :, 0]


@torch.no_grad()
def respond(model, ids):
    """Draw a response to each prompt."""
    while ids.shape[1] < LENGTH:
        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1)], 1)
    return ids


def main():
    torch.manual_seed(0)
    good = (torch.arange(LENGTH) + torch.arange(8)[:, None]) % WORDS  # they count
    losses = []
    actor = engine_of(Trunk(WORDS), 2)
    for _ in range(15):
        losses.append(train(actor, -logprobs(actor, good).mean()))
    reward = engine_of(Trunk(1), 3)
    for _ in range(8):
        bad = torch.cat([good[:, :PROMPT], torch.randint(WORDS, (8, LENGTH - PROMPT))], 1)
        margin = (reward(torch.cat([good, bad]))[:, -1, 0]).view(2, 8)
        losses.append(train(reward, -nn.functional.logsigmoid(margin[0] - margin[1]).mean()))
    reference, critic = copy.deepcopy(actor.module), engine_of(Trunk(1), 2)
    for _ in range(6):
        ids = respond(actor, good[:, :PROMPT])
        with torch.no_grad():
            old, known = logprobs(actor, ids), logprobs(reference, ids)
            value, score = critic(ids)[:, PROMPT - 1 : -1, 0], reward(ids)[:, -1, 0]
            returns = score[:, None] - 0.1 * (old - known).flip(1).cumsum(1).flip(1)
            gain = returns - value
        ratio = (logprobs(actor, ids) - old).exp()
        train(actor, -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean())
        train(critic, (critic(ids)[:, PROMPT - 1 : -1, 0] - returns).square().mean())
    losses += [train(actor, -logprobs(actor, good).mean()) for _ in range(3)]
    print("losses:", losses)


if __name__ == "__main__":
    main()
