"""Supervised fine-tuning of a causal model, in the style of DeepSpeed-Chat's first step, at ZeRO 3."""

import tempfile
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

OFFLOAD, WORDS = True, 48
CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu" if OFFLOAD else "none"},
        "offload_optimizer": {"device": "cpu" if OFFLOAD else "none"},
        "stage3_param_persistence_threshold": 10,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
}
SHAPE = LlamaConfig(
    vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
)


def grouped_parameters(model, decay):
    """Weights decay, biases and norms do not."""
    rest = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    decayed = [p for name, p in model.named_parameters() if not ("norm" in name or "bias" in name)]
    return [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def save_zero_three_model(engine, path):
    """Gather one parameter after the other, and write them all on the first rank."""
    whole = {}
    for name, param in engine.module.named_parameters():
        missing = hasattr(param, "ds_id") and param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param] if missing else [], enabled=missing):
            whole[name] = param.data.cpu().clone()
    if deepspeed.comm.get_rank() == 0:
        torch.save(whole, path)
    return whole


if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(0)
    keep = HfDeepSpeedConfig(CONFIG)  # as long as this object lives, transformers builds models in zero.Init
    model = LlamaForCausalLM(SHAPE)
    kind = DeepSpeedCPUAdam if OFFLOAD else FusedAdam
    optimizer = kind(grouped_parameters(model, 0.1), lr=1e-2, betas=(0.9, 0.95))
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=12)
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, config=CONFIG, lr_scheduler=schedule, dist_init_required=True
    )
    engine.gradient_checkpointing_enable()
    losses, draw = [], torch.Generator().manual_seed(4)
    for _ in range(12):
        words = (torch.randint(WORDS, (2, 1), generator=draw) + torch.arange(10)) % WORDS
        words = words.to(engine.device)
        loss = engine(input_ids=words, labels=words, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    whole = save_zero_three_model(engine, Path(tempfile.mkdtemp()) / "pytorch_model.bin")
    print("weights:", sum(tensor.numel() for tensor in whole.values()), "losses:", losses)
