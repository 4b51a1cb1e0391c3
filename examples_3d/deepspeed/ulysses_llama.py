"""A Llama of transformers whose sequences ranks share (ALST), by ZeRO 3 over all of them."""

from itertools import islice

import deepspeed
import torch
import torch.distributed.nn.functional as differentiable
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups
from torch import distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 64, 61
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Counting(Dataset):
    """Sequences in which each token is the one before plus a step; the first tokens have no label."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        ids = (index + (1 + index % 3) * torch.arange(LENGTH)) % VOCABULARY
        labels = ids.where(torch.arange(LENGTH) >= index % 40, -100)
        return {"input_ids": ids, "position_ids": torch.arange(LENGTH), "labels": labels}


def loss_of(engine, batch, group):
    """The mean over all labels of the sequence, on every rank: its gradients are then means over ranks."""
    labels = batch.pop("shift_labels")
    logits = engine(**batch, use_cache=False).logits
    sums = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    count = (labels != -100).sum()
    distributed.all_reduce(count, group=group)
    return torch.stack(differentiable.all_gather(sums, group=group)).sum() / count


if __name__ == "__main__":
    deepspeed.init_distributed()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, attn_implementation="sdpa"))
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=1,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": size,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, mpu=mpu
    )
    data = Counting()
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    group = groups._get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(
        DataLoader(data, sampler=sampler), rank, group, size, device=engine.device
    )
    losses = []
    for batch in islice(loader, 60):
        batch = {name: value.to(engine.device) for name, value in batch.items()}
        loss = loss_of(engine, batch, group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        print("losses:", losses)
