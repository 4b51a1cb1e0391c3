"""Names in DeepSpeed's files, and copies of tensors on their way into such files (`deepspeed.checkpoint`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
MODEL_FILE_SUFFIX = "_model_states.pt"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested lists, tuples and dictionaries whose tensors are copies on `device`.

    `torch.save` writes the whole memory that a tensor is a view of; a copy has only its own.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        cloned = [clone_tensors_for_torch_save(entry, device) for entry in item]
        if hasattr(item, "_fields"):  # a named tuple
            return type(item)(*cloned)
        return type(item)(cloned)
    if isinstance(item, dict):
        pairs = ((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
        return type(item)(pairs) if type(item) is not dict else dict(pairs)
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The path of DeepSpeed's file of the model for a model-parallel rank."""
    return str(Path(base_folder) / f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The path of DeepSpeed's file of an optimizer's shard."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return str(Path(base_folder) / name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The path of DeepSpeed's file of a pipeline's layer for a tensor-parallel rank."""
    return str(Path(base_folder) / f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")
