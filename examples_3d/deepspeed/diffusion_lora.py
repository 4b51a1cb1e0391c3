"""A denoiser and the low-rank adapters of a text encoder, trained together: two engines, one loss."""

import deepspeed
import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it."""

    def __init__(self, size, rank=2):
        super().__init__()
        self.frozen = nn.Linear(size, size)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.words.requires_grad_(False)
        self.layer = Adapted(16)

    def forward(self, ids):
        return torch.tanh(self.layer(self.words(ids))).mean(1)


class Denoiser(nn.Module):
    """Two scales with a bridge; time and text are added in the middle."""

    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.time, self.text = nn.Linear(1, 16), nn.Linear(16, 16)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, noisy, time, text):
        first = torch.relu(self.enter(noisy))
        middle = self.down(first) + (self.time(time) + self.text(text))[:, :, None, None]
        return self.leave(torch.cat([first, self.up(torch.relu(middle))], 1))


def main():
    torch.manual_seed(0)
    encoder, denoiser = TextEncoder(), Denoiser()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engines = []
    for model in (encoder, denoiser):
        trained = [param for param in model.parameters() if param.requires_grad]
        engines.append(deepspeed.initialize(model=model, model_parameters=trained, config=config)[0])
    encoder, denoiser = engines
    images, ids = torch.randn(8, 1, 8, 8), torch.randint(20, (8, 5))
    losses = []
    for _ in range(10):
        time, noise = torch.rand(8, 1), torch.randn(8, 1, 8, 8)
        share = time[:, :, None, None]
        predicted = denoiser((1 - share) * images + share * noise, time, encoder(ids))
        loss = (predicted - noise).square().mean()
        loss.backward()
        for engine in engines:
            engine.step()
        losses.append(loss.item())
    print("losses:", losses)


if __name__ == "__main__":
    main()
