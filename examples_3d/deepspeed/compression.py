"""A student with half of its teacher's layers, trained with pruned rows and few bits, then made small."""

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def group(params, modules, related=None):
    return {"all": {"params": params, "modules": modules, "related_modules": related}}


COMPRESSION = {
    "layer_reduction": {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["head"],
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 4, "method": "topk"},
        "different_groups": group({"dense_ratio": 0.5}, ["up"], [["down"]]),
    },
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "schedule_offset": 8, "quantization_type": "symmetric"},
        "different_groups": group({"start_bits": 4, "target_bits": 1, "quantization_period": 4}, ["down"]),
    },
}


def train(model, config, x, target, steps):
    """Follow `target`."""
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(steps):
        loss = (engine(x) - target).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main():
    torch.manual_seed(0)
    config = {"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 5e-3}}}
    config["compression_training"] = COMPRESSION
    x = torch.randn(32, 16)
    teacher = Net(4)
    train(teacher, config, x, nn.functional.one_hot(torch.arange(32) % 4).float(), 10)
    student = init_compression(Net(2), config, teacher_model=teacher)
    losses = train(student, config, x, teacher(x).detach(), 30)
    before = student.eval()(x)
    small = redundancy_clean(student, config)
    assert small.layers[0].up.weight.shape == (16, 16)
    assert len(small.layers[0].down.weight.unique()) <= 3  # one bit, and what was pruned
    assert torch.allclose(small(x), before, atol=1e-5)
    print("losses:", losses)


if __name__ == "__main__":
    main()
