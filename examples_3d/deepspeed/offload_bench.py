"""Seconds of a step at ZeRO 3 with weights and states on the host, as offload benchmarks take them."""

import argparse
import time

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import see_memory_usage
from torch import nn

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pin", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    there = {"device": "cpu", "pin_memory": args.pin}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": there,
            "offload_param": there,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 1e9,
        },
    }
    torch.manual_seed(0)
    see_memory_usage("before the model", force=True)
    with deepspeed.zero.Init(config_dict_or_path=config):
        rows = [nn.Sequential(nn.Linear(args.hidden, args.hidden), nn.GELU()) for _ in range(args.layers)]
        model = nn.Sequential(*rows, nn.Linear(args.hidden, 1))
    count = sum(param.ds_numel for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    see_memory_usage("after initialize", force=True)
    draw, losses, seconds = torch.Generator().manual_seed(8), [], []
    for _ in range(6):
        x = torch.randn(4, args.hidden, generator=draw).to(engine.device)
        get_accelerator().synchronize()
        start = time.perf_counter()
        loss = (engine(x)[:, 0] - x.mean(-1)).square().mean()
        engine.backward(loss)
        engine.step()
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    print(f"{count} weights, {min(seconds):.4f} s", "losses:", losses)
    engine.destroy()
