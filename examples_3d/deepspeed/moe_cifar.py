"""A classifier with experts, in the style of DeepSpeed's CIFAR tutorial for them, at ZeRO 2."""

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


class Net(nn.Module):
    """Two linear layers with experts between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.experts = MoE(
            hidden_size=16,
            expert=nn.Linear(16, 16),
            num_experts=4,
            ep_size=1,
            k=1,
            min_capacity=0,
            use_rts=False,
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x, balance, _ = self.experts(x)
        return self.last(x), balance


def create_moe_param_groups(model):
    """One group of dense parameters, and one for each kind of experts."""
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )


if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000, "overlap_comm": True},
    }
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=create_moe_param_groups(net), config=config
    )
    draw, losses = torch.Generator().manual_seed(5), []
    for _ in range(20):
        labels = torch.randint(4, (16,), generator=draw)
        x = torch.randn(16, 12, generator=draw) * 0.1
        x[torch.arange(16), labels * 3] += 2
        out, balance = engine(x.to(engine.device))
        loss = nn.functional.cross_entropy(out, labels.to(engine.device)) + 0.01 * balance
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print("losses:", losses)
