"""Optimizer state in folders of ranks as Megatron-LM and DeepSpeed write it, without the code under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from tests.formats.megatron.samples import (
    OLD,
    Layout,
    Weights,
    arguments_of,
    chunk_of,
    dialect_of,
    slice_of,
)

Kinds = dict[str, Weights]
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = 97


def place(name: str) -> tuple[int, int]:
    """A sort key for the order of tensors in Core's model: embedding, layers, final norm, head."""
    if ".layers." in name:
        return 1, int(name.split(".layers.")[1].split(".")[0])
    return (0 if "embedding" in name and "head" not in name else 3 if "output" in name else 2), 0


def flat(tree: dict[str, Any], prefix: str = "") -> Weights:
    """Nested tensors by name."""
    out: Weights = {}
    for name, value in tree.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return {name: value for name, value in out.items() if isinstance(value, Tensor)}


def decays(name: str, tensor: Tensor, small: bool = False) -> bool:
    """Whether a parameter has weight decay; with `small`, norms of queries and keys have."""
    if small and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return not (name.endswith(".bias") or tensor.dim() == 1)


def save_ranks(
    run: Path,
    model: ModelConfig,
    kinds: Kinds,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    distributed: bool = False,
    bucket: int | None = None,
    tied_alone: bool = False,
    facts: dict[str, Any] | None = None,
    iteration: int = 100,
    step: int = STEP,
) -> Path:
    """Write a folder of Megatron-LM's, with the whole state of an optimizer or one buffer for each chunk."""
    folder = run / f"iter_{iteration:07d}"
    for tp in range(layout.tp):
        whole = {kind: slice_of(model, weights, tp, layout) for kind, weights in kinds.items()}
        for pp in range(layout.pp):
            chunks = []
            for v in range(layout.chunks):
                of = {kind: chunk_of(tensors, model, pp, v, layout) for kind, tensors in whole.items()}
                of = {k: {n: t[n] for n in sorted(t, key=place)} for k, t in of.items()}
                chunks.append({kind: dialect_of(tensors, layout) for kind, tensors in of.items()})
            names = ["model"] if layout.chunks == 1 else [f"model{v}" for v in range(layout.chunks)]
            args = arguments_of(model, layout)
            vars(args).update(facts or {})
            saved = {"args": args, "iteration": iteration, "checkpoint_version": layout.version}
            for name, chunk in zip(names, chunks, strict=True):
                saved[name] = narrowed(chunk["weight"], dtype)
            rank = folder / (f"mp_rank_{tp:02d}" if layout.pp == 1 else f"mp_rank_{tp:02d}_{pp:03d}")
            rank.mkdir(parents=True)
            flats = [{kind: flat(tree) for kind, tree in chunk.items()} for chunk in chunks]
            if distributed:
                alone = ("word_embeddings", "output_layer") if tied_alone else ()
                torch.save(buffers(flats, dtype, bucket, alone), rank / "distrib_optim.pt")
                groups = [{"wd_mult": 1.0, "step": step}, {"wd_mult": 0.0, "step": step}]
                saved["optimizer"] = {"optimizer": {"param_groups": groups}}
            else:
                small = vars(args).get("apply_wd_to_qk_layernorm", False)
                saved["optimizer"] = numbered(flats, dtype, step, small)
            torch.save(saved, rank / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def narrowed(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, dict):
        return {name: narrowed(value, dtype) for name, value in tree.items()}
    return tree.to(dtype) if isinstance(tree, Tensor) else tree


def numbered(chunks: list[Kinds], dtype: torch.dtype, step: int, small: bool = False) -> dict[str, Any]:
    """Parameters by number: first those with weight decay, then the others."""
    groups, state, masters = [], {}, []
    for decayed in (True, False):
        numbers, own = [], []
        for chunk in chunks:
            for name, weight in chunk["weight"].items():
                if decays(name, weight, small) == decayed:
                    numbers.append(len(state))
                    own.append(weight.clone())
                    state[len(state)] = {kind: chunk[kind][name].clone() for kind in MOMENTS}
        groups.append({"params": numbers, "wd_mult": float(decayed), "lr_mult": 1.0, "step": step})
        masters.append(own)
    inner = {"state": state, "param_groups": groups}
    return inner if dtype is torch.float32 else {"optimizer": inner, "fp32_from_fp16_params": masters}


def buffers(
    chunks: list[Kinds], dtype: torch.dtype, bucket: int | None, alone: tuple[str, ...]
) -> dict[Any, Any]:
    """One flat buffer for each chunk, with parameters in reverse, each at a multiple of 64 in its bucket."""
    out: dict[Any, Any] = {"buckets_coalesced": True}
    for number, chunk in enumerate(chunks):
        joined = {}
        for kind, tensors in chunk.items():
            done: list[Tensor] = []
            run: list[Tensor] = []
            for name, tensor in reversed(tensors.items()):
                length = sum(part.numel() for part in run)
                run.append(torch.zeros(-length % 64))
                own = any(word in name for word in alone)
                if own and length:
                    done, run = [*done, *run], []
                run.append(tensor.flatten())
                length = sum(part.numel() for part in run)
                if own or (bucket is not None and length >= bucket):
                    done, run = [*done, *run], []
            joined["param" if kind == "weight" else kind] = torch.cat([*done, *run])
        joined["numel_unpadded"] = joined["param"].numel()  # type: ignore[assignment]
        out[number] = {(dtype, torch.float32): joined}
    return out


def save_zero(
    run: Path,
    model: ModelConfig,
    kinds: Kinds,
    layout: Layout,
    *,
    dp: int = 2,
    bf16: bool = False,
    pipeline: bool = False,
    facts: dict[str, Any] | None = None,
    iteration: int = 100,
    step: int = STEP,
) -> Path:
    """Write a folder of Megatron-DeepSpeed's, with the files of ZeRO 1 or of the bf16 optimizer."""
    folder = run / f"global_step{iteration}"
    folder.mkdir(parents=True)
    dtype = torch.bfloat16
    for tp in range(layout.tp):
        whole = {kind: slice_of(model, weights, tp, layout) for kind, weights in kinds.items()}
        for pp in range(layout.pp):
            rank = pp * layout.tp + tp
            if pipeline:
                named = {kind: by_module(t, model, pp, layout.pp) for kind, t in whole.items()}
                modules: dict[int, Weights] = {}
                for name, tensor in named["weight"].items():
                    number, _, rest = name.removeprefix("tied_modules.embed.").partition(".")
                    if name.startswith("tied_modules"):
                        number, rest = "1", f"{number}.{rest}"
                    if pp == 0 or not name.startswith("tied_modules"):
                        modules.setdefault(int(number), {})[rest] = tensor.to(dtype)
                for number, module in modules.items():
                    torch.save(module, folder / f"layer_{number:02d}-model_{tp:02d}-model_states.pt")
                module_states: Any = None
            else:
                old = Layout(layout.tp, dialect="old", version=layout.version, arguments=layout.arguments)
                trees = {k: dialect_of(chunk_of(t, model, 0, 0, old), old) for k, t in whole.items()}
                named, module_states = (
                    {k: flat(t) for k, t in trees.items()},
                    narrowed(trees["weight"], dtype),
                )
            groups = [
                [n for n, t in named["weight"].items() if decays(n, t) == decayed]
                for decayed in (True, False)
            ]
            args = arguments_of(model, layout)
            vars(args).update(facts or {})
            saved = {"module": module_states, "args": args, "iteration": iteration}
            saved |= {"checkpoint_version": layout.version, "dp_world_size": dp}
            saved["param_shapes"] = [{n: named["weight"][n].shape for n in group} for group in groups]
            torch.save(saved, folder / f"mp_rank_{rank:02d}_model_states.pt")
            save_parts(folder, rank, named, groups, dp, bf16, step)
    (run / "latest").write_text(folder.name)
    return folder


def by_module(tensors: Weights, model: ModelConfig, stage: int, stages: int) -> Weights:
    """A stage's parameters by DeepSpeed's pipeline names, which begin with the module's number."""
    out: Weights = {}
    tied = "output_layer.weight" not in tensors
    for name, tensor in sorted(tensors.items(), key=lambda item: place(item[0])):
        for core, old in OLD.items():
            name = name.replace(core, old)
        first, last = stage == 0, stage == stages - 1
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if int(number) * stages // model.num_layers == stage:
                out[f"{3 + int(number)}.{rest}"] = tensor
        elif name.startswith("embedding.") and (first or (last and tied)):
            out[("tied_modules.embed." if tied else "1.") + name.removeprefix("embedding.")] = tensor
        elif name.startswith("output_layer.") and last:
            out[f"{model.num_layers + 5}.lm_head.weight"] = tensor
        elif name.startswith("decoder.final_layernorm.") and last:
            out[f"{model.num_layers + 4}.{name.removeprefix('decoder.final_layernorm.')}"] = tensor
    return out


def save_parts(
    folder: Path, rank: int, named: Kinds, groups: list[list[str]], dp: int, bf16: bool, step: int
) -> None:
    """Write each data-parallel rank's file, with its slice of each group's vector."""
    vectors: dict[str, list[tuple[Tensor, ...]]] = {kind: [] for kind in named}
    padding = []
    for group in groups:
        for kind, tensors in named.items():
            whole = torch.cat([tensors[name].flatten() for name in group])
            gap = -whole.numel() % (2 * dp)
            vectors[kind].append(torch.cat([whole, torch.zeros(gap)]).chunk(dp))
        padding.append(gap)
    for data in range(dp):
        own = {kind: [parts[data].clone() for parts in of] for kind, of in vectors.items()}
        gaps = padding if data == dp - 1 else [0] * len(groups)
        masters = own["weight"]
        if not bf16:
            masters = [part[: part.numel() - gap] for part, gap in zip(masters, gaps, strict=True)]
        state = {
            number: {"step": step, **{kind: own[kind][number] for kind in MOMENTS}}
            for number in range(len(groups))
        }
        base = {"state": state, "param_groups": [{"params": [n], "lr": 1e-3} for n in range(len(groups))]}
        saved = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": gaps,
            "partition_count": [dp] * len(groups),
            "clip_grad": 1.0,
        }
        name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": saved, "ds_version": "0.16.0"}, folder / name)
