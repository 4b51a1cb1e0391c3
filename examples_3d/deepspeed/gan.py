"""A GAN with an engine for each of two networks, in the style of DeepSpeed's GAN tutorial."""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.5, 0.999], "eps": 1e-8}},
    "steps_per_print": 10,
}


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    critic_engine, _, _, _ = deepspeed.initialize(
        args=args, model=critic, model_parameters=critic.parameters(), config=CONFIG
    )
    generator_engine, _, _, _ = deepspeed.initialize(
        args=args, model=generator, model_parameters=generator.parameters(), config=CONFIG
    )
    criterion, losses, draw = nn.BCELoss(), [], torch.Generator().manual_seed(3)
    device = critic_engine.device
    real_label, fake_label = torch.ones(8, 1, device=device), torch.zeros(8, 1, device=device)
    for _ in range(40):
        real = torch.randn(8, 2, generator=draw).to(device) * 0.1 + 1
        noise = torch.randn(8, 4, generator=draw).to(device)
        critic_engine.zero_grad()
        fake = generator_engine(noise)
        of_real = criterion(critic_engine(real), real_label)
        critic_engine.backward(of_real)
        of_fake = criterion(critic_engine(fake.detach()), fake_label)
        critic_engine.backward(of_fake)
        critic_engine.step()

        generator_engine.zero_grad()
        fooled = criterion(critic_engine(fake), real_label)
        generator_engine.backward(fooled)
        generator_engine.step()
        losses.append((of_real + of_fake).item())
    print("losses:", losses)


if __name__ == "__main__":
    main()
