"""YAML configurations and DeepSpeed JSONs, read as `--check-config` reads them."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

from megazero.config.document import to_yaml
from megazero.config.fields import FIELDS, FieldSpec
from megazero.config.resolve import parse_config
from megazero.config.rules.rule import value_at
from megazero.config.tree.config import Config
from proofs.fuzz_inputs.harness import Kind, Sample
from proofs.fuzz_inputs.mutate import of_json, of_lines, of_yaml

EXAMPLES = Path(__file__).parents[2] / "examples_3d"
RANKS: Mapping[str, int] = {
    "gpt_tiny_cpu": 1,
    "gpt2_345m": 8,
    "llama_1b_tp2_sp": 8,
    "gpt_pipeline_zero_cpu": 4,
    "gpt3_175b_3d": 1024,
}
# A key of every type, and most sections.
ODD = b"""\
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, seq_length: 32, normalization: rmsnorm,
  vocab_size: 99}
batch: {micro_batch_size: 2, global_batch_size: 16}
optimizer: {lr: 1e-3, min_lr: 1.0e-5, adam_beta1: 0.9, adam_eps: 1e-8, clip_grad: 1, lr_warmup_iters: 10}
precision: {dtype: fp16, initial_loss_scale: 65536.0, hysteresis: 2}
tokenizer: {tokenizer_type: NullTokenizer}
data: {data_path: [0.3, "a b", 0.7, my_text], split: "969,30,1"}
training: {train_tokens: 3e6, seed: 1234}
checkpoint: {save: out, save_interval: 100, async_save: true}
zero: {stage: 1}
logging:
"""
FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 100 "
    "--tokenizer-type ByteLevelTokenizer --data-path my_text_document"
)


def _yaml_samples(folder: Path) -> list[Sample]:
    texts = {name: (EXAMPLES / f"{name}.yaml").read_bytes() for name in RANKS} | {"odd": ODD}
    return [
        Sample(name, {"config.yaml": text}, {"config.yaml": (of_yaml, of_yaml, of_lines)})
        for name, text in texts.items()
    ]


def _parsed(flags: list[str], ranks: int) -> Config:
    config = parse_config(flags, world_size=ranks).config
    to_yaml(config).encode()  # what `--check-config` prints
    return config


def _read_yaml(folder: Path, sample: Sample) -> Config:
    return _parsed(["--config", str(folder / "config.yaml")], RANKS.get(sample.name, 1))


def _compare_yaml(folder: Path, sample: Sample, config: Config) -> str | None:
    stated = {
        f"{section}.{key}": value
        for section, keys in (yaml.safe_load((folder / "config.yaml").read_bytes()) or {}).items()
        for key, value in (keys or {}).items()
    }
    return _difference(config, stated)


def _difference(config: Config, stated: Mapping[str, Any]) -> str | None:
    """Where the tree is not what the file states, or, where it states nothing, not the default."""
    unknown = stated.keys() - {spec.path for spec in FIELDS}
    if unknown:
        return f"keys that do not exist were taken: {sorted(unknown)!r}"
    for spec in FIELDS:
        got = value_at(config, spec.path)
        if spec.path not in stated:
            # A default of None stands for a value that follows from others.
            right = spec.default is None or got == spec.default
        else:
            right = _means(stated[spec.path], got, spec)
        if not right:
            return f"{spec.path} is {got!r}, but the file says {stated.get(spec.path, spec.default)!r}"
    return None


def _means(value: Any, got: Any, spec: FieldSpec) -> bool:
    """Whether `got` is what a person would take `value` for."""
    if value is None:
        return got is None or spec.default is None
    if isinstance(got, tuple):
        items = (
            value.split() if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        )
        return len(items) == len(got) and all(_same(a, b) for a, b in zip(items, got, strict=True))
    if isinstance(got, str) and spec.choices and isinstance(value, str):
        return value.lower() == got.lower()
    return _same(value, got) or _is_never(value, got, spec)


def _is_never(value: Any, got: Any, spec: FieldSpec) -> bool:
    """Whether `got` is how the tree says the never, or the no end, that `value` stands for."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
    if got is None or spec.name == "eval_iters":
        return value <= 0 and not got
    return spec.is_endless and value > got == 2**63 - 1


def _same(value: Any, got: Any) -> bool:
    if isinstance(got, bool) or isinstance(value, bool):
        return value is got or str(value).lower() == str(got).lower()
    if isinstance(got, str):
        return str(value) == got
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return False
    return number == got or (isinstance(got, float) and math.isclose(number, got, rel_tol=1e-15))


_FP16 = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-4, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
    },
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7, "overlap_comm": False},
    "wall_clock_breakdown": True,
}
_BF16 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "bf16",
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 1e6,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 1e8,
    },
    "activation_checkpointing": {"partition_activations": False},
    "seed": 7,
}
_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
    "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "first"},
    "comms_logger": {"enabled": True, "verbose": False},
}
_OWN_FLAGS: Mapping[str, list[str]] = {
    "fp16": [],
    "bf16": [],
    "auto": ["--micro-batch-size", "4", "--lr", "3e-4", "--weight-decay", "0.3", "--bf16"],
}
"""Flags besides `FLAGS`; "auto" takes its values from these."""


def _deepspeed_samples(folder: Path) -> list[Sample]:
    return [
        Sample(
            name,
            {"ds.json": json.dumps(content, indent=1).encode()},
            {"ds.json": (of_json, of_json, of_json, of_lines)},
        )
        for name, content in (("fp16", _FP16), ("bf16", _BF16), ("auto", _AUTO))
    ]


def _read_deepspeed(folder: Path, sample: Sample) -> Config:
    return _parsed(
        [*FLAGS, *_OWN_FLAGS[sample.name], "--deepspeed", "--deepspeed_config", str(folder / "ds.json")], 1
    )


def _compare_deepspeed(folder: Path, sample: Sample, config: Config) -> str | None:
    flags = [*FLAGS, *_OWN_FLAGS[sample.name]]
    micro = 4 if "--micro-batch-size" in flags else None
    stated = _stated(json.loads((folder / "ds.json").read_bytes()), micro)
    # What the file leaves open is as flags give it; those that a run needs may be anything here.
    needed = [] if "--micro-batch-size" in flags else ["--micro-batch-size", "1", "--lr", "1.0"]
    plain = parse_config([*flags, *needed], world_size=1).config
    for spec in FIELDS:
        got, expected = value_at(config, spec.path), stated.get(spec.path, value_at(plain, spec.path))
        if spec.path not in stated and expected is None:
            continue
        if not _means(expected, got, spec):
            return f"{spec.path} is {got!r}, but should be {expected!r}"
    return None


_PLAIN: Mapping[str, str] = {
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.eps": "optimizer.adam_eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.momentum": "optimizer.sgd_momentum",
    "gradient_clipping": "optimizer.clip_grad",
    "fp16.loss_scale_window": "precision.loss_scale_window",
    "fp16.hysteresis": "precision.hysteresis",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.reduce_bucket_size": "zero.bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size": "zero.prefetch_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero.param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "zero.max_live_parameters",
    "activation_checkpointing.partition_activations": "recompute.partition_activations",
    "wall_clock_breakdown": "logging.wall_clock_breakdown",
    "comms_logger.enabled": "logging.comms_logger",
    "seed": "training.seed",
}
"""Keys of the samples whose value is the value of a field."""


def _stated(content: Mapping[str, Any], micro_of_flags: int | None) -> dict[str, Any]:
    """Path -> value of the fields that a DeepSpeed JSON determines, by DeepSpeed's documentation."""
    leaves = {path: value for path, value in _leaves(content) if value not in (None, "auto")}
    optimizer = leaves.get("optimizer.type")
    fp16 = leaves.get("fp16.enabled") is True
    skipped = ["optimizer."] * (optimizer is None) + ["fp16."] * (not fp16)
    leaves = {path: value for path, value in leaves.items() if not path.startswith(tuple(skipped))}
    out = {field: leaves[path] for path, field in _PLAIN.items() if path in leaves}
    if optimizer is not None:
        out["optimizer.optimizer"] = "sgd" if optimizer.lower() == "sgd" else "adam"
        asked = content["optimizer"].get("params") or {}
        for name, field in (("weight_decay", "weight_decay"), ("momentum", "sgd_momentum")):
            if asked.get(name) is None:
                out[f"optimizer.{field}"] = 0.0
        betas = leaves.get("optimizer.params.betas")
        if betas is not None:
            out["optimizer.adam_beta1"], out["optimizer.adam_beta2"] = betas
    if fp16:
        out["precision.dtype"] = "fp16"
        out["precision.initial_loss_scale"] = 2.0 ** leaves.get("fp16.initial_scale_power", 16)
        out["precision.loss_scale"] = leaves.get("fp16.loss_scale") or None
    elif leaves.get("bf16.enabled", leaves.get("bfloat16.enabled")) is True:
        out["precision.dtype"] = "bf16"
    if (content.get("zero_optimization") or {}).get("reduce_bucket_size") == "auto":
        out["zero.bucket_size"] = 64 * 64  # the hidden size squared, as transformers resolves it
    if "zero_optimization.overlap_comm" in leaves:
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            out[f"zero.{name}"] = leaves["zero_optimization.overlap_comm"]
    for path, field in (
        ("data_types.grad_accum_dtype", "grad_accumulation_dtype"),
        ("communication_data_type", "grad_reduce_dtype"),
    ):
        if path in leaves:
            out[f"zero.{field}"] = leaves[path]
    if leaves.get("tensorboard.enabled") is True:
        name = leaves.get("tensorboard.job_name", "DeepSpeedJobName")
        out["logging.tensorboard_dir"] = str(Path(leaves.get("tensorboard.output_path", ""), name))
    train, micro = leaves.get("train_batch_size"), leaves.get("train_micro_batch_size_per_gpu")
    steps = leaves.get("gradient_accumulation_steps")
    if micro is not None:
        out["batch.micro_batch_size"] = micro
        out["batch.global_batch_size"] = train if train is not None else micro * (steps or 1)
    elif train is not None:
        # Without a micro-batch size from anywhere, one rank takes all of an accumulation's samples.
        out["batch.global_batch_size"] = train
        out["batch.micro_batch_size"] = micro_of_flags or train // (steps or 1)
    return out


def _leaves(content: Mapping[str, Any], above: str = "") -> Any:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


YAML = Kind("YAML", _yaml_samples, _read_yaml, _compare_yaml)
DEEPSPEED = Kind("DeepSpeed JSON", _deepspeed_samples, _read_deepspeed, _compare_deepspeed)
