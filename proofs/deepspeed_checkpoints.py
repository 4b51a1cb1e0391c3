"""Record small checkpoints that DeepSpeed itself writes, for `tests/formats/deepspeed`.

    python proofs/deepspeed_checkpoints.py FOLDER

FOLDER holds the package `deepspeed` (see `deepspeed_answers.py`). Each row of `RUNS` trains `Small` for
`STEPS` on so many ranks and saves it. ``tests/formats/deepspeed/checkpoints.zip`` gets its files, and
``RUN/expected.safetensors``: the fp32 weights and the moments of that run as its optimizer had them in
memory, what a further step makes of the weights, counters, the learning rate and the loss scale.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "tests/formats/deepspeed/checkpoints.zip"
STEPS = 5
SGD = {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 10}}


def config(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    """A JSON for a run; fp16 meets an overflow at its first steps."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "scheduler": SCHEDULE,
        "zero_allow_untested_optimizer": True,
    }
    if precision == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    for key, value in more.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return settings


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"stage{stage}-{precision}": (2, config(stage, precision))
        for stage in range(4)
        for precision in ("fp32", "bf16", "fp16")
    },
    # A scale at which no gradient overflows: overflows at stage 0 have not been compared.
    "stage0-fp16": (2, config(0, "fp16", fp16={"initial_scale_power": 8})),
    "stage2-of-3": (3, config(2, "fp32")),
    "stage3-of-3": (3, config(3, "fp32")),
    "stage1-of-1": (1, config(1, "bf16")),
    "stage1-accumulates-fp32": (
        2,
        config(1, "bf16", data_types={"grad_accum_dtype": "fp32"}),
    ),
    "stage2-round-robin": (2, config(2, "fp32", zero_optimization={"round_robin_gradients": True})),
    "stage2-elastic": (2, config(2, "fp32", zero_optimization={"elastic_checkpoint": True})),
    "stage3-sub-groups": (2, config(3, "bf16", zero_optimization={"sub_group_size": 30})),
    "stage0-sgd": (2, config(0, "fp16", optimizer=SGD)),
    "stage1-sgd": (2, config(1, "fp32", optimizer=SGD)),
}


UNIVERSAL = {"universal1": "stage1-fp32", "universal3": "stage3-fp32"}


def whole_state(wrapped: Any, model: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Masters and moments at stage 0, whichever of DeepSpeed's wrappers is around torch's optimizer."""
    from tests.formats.deepspeed.small import groups_of

    names = {id(param): name for name, param in model.named_parameters()}
    inner = getattr(wrapped, "optimizer", wrapped)
    kept = {}
    for number, group in enumerate(groups_of(model)):
        at = 0
        for i, param in enumerate(group["params"]):
            cut = slice(None)
            if hasattr(wrapped, "fp32_groups_flat"):
                master = wrapped.fp32_groups_flat[number]
                cut = slice(at, at + param.numel())
            else:
                master = wrapped.fp32_groups[number][i] if hasattr(wrapped, "fp32_groups") else param
            at += param.numel()
            values = {"": master, **{f"/{kind}": inner.state[master][kind] for kind in kinds}}
            for suffix, value in values.items():
                flat = value.detach().reshape(-1)[cut]
                kept[names[id(param)] + suffix] = flat.view(param.shape)
    return kept


def train(name: str, folder: Path) -> None:
    """One rank's part of a run."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    # It holds the CPU to be incapable of fp16, which torch computes there.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True

    from tests.formats.deepspeed.small import Small, groups_of, small_batch

    settings = RUNS[name][1]
    torch.manual_seed(3)
    model = Small()
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=groups_of(model))
    ranks, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()

    def step(number: int) -> None:
        engine.backward(engine(*small_batch(number, rank)))
        engine.step()

    for number in range(STEPS):
        step(number)
    client = {"epoch": 4, "seen": torch.arange(3), "args": argparse.Namespace(seed=3)}
    engine.save_checkpoint(str(folder / name), client_state=client)
    kinds = ("momentum_buffer",) if name.endswith("sgd") else ("exp_avg", "exp_avg_sq")
    kept: dict[str, torch.Tensor] = {}
    stage, wrapped = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        kept |= whole_state(wrapped, model, kinds)
    else:
        if stage < 3:  # DeepSpeed links them at the first step, but to what it made before
            wrapped._hp_optimizer_states_linked = False
            wrapped._lazy_init_hp_params_optimizer_state()
        for label, param in model.named_parameters():
            if param.requires_grad:
                kept[label] = safe_get_full_fp32_param(param)
                kept |= {f"{label}/{kind}": safe_get_full_optimizer_state(param, kind) for kind in kinds}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        frozen = {n: p.detach().float().clone() for n, p in model.named_parameters() if not p.requires_grad}
    kept |= frozen
    kept = {key: value.float().clone().contiguous() for key, value in kept.items()}
    kept |= {n: b.detach().clone() for n, b in model.named_buffers()}
    scale = float(getattr(getattr(wrapped, "loss_scale_config", wrapped), "cur_scale", None) or 1.0)
    kept["facts"] = torch.tensor(
        [engine.global_steps, engine.skipped_steps, engine.global_samples, ranks, engine.get_lr()[0], scale]
    ).double()
    step(STEPS)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        kept |= {f"{n}/next": p.detach().float().clone() for n, p in model.named_parameters()}
    if rank == 0:
        save_file(kept, folder / name / "expected.safetensors")


def main() -> None:
    """Make the runs that are named, or all, or be one rank of those with so many ranks."""
    if sys.argv[1] == "train":
        for name in sys.argv[3:]:
            print(name, flush=True)
            train(name, Path(sys.argv[2]))
        return
    site, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in sorted({RUNS[name][0] for name in names or RUNS}):
            wanted = [name for name in names or RUNS if RUNS[name][0] == ranks]
            path = os.pathsep.join([str(ROOT), site, os.environ.get("PYTHONPATH", "")])
            environment = {
                **os.environ,
                "PYTHONPATH": path,
                "DS_ACCELERATOR": "cpu",
                "LOCAL_SIZE": str(ranks),
            }
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command = [sys.executable, *launcher, __file__, "train", scratch, *wanted]
            subprocess.run(command, env=environment, cwd=ROOT, check=True)
        for name, source in UNIVERSAL.items():
            if source in (names or RUNS):
                convert(Path(scratch), name, source, environment)
        pack(Path(scratch))


def convert(folder: Path, name: str, source: str, environment: dict[str, str]) -> None:
    """Let DeepSpeed make a universal checkpoint of a run."""
    tag = f"global_step{STEPS}"
    words = ["--input_folder", folder / source / tag, "--output_folder", folder / name / tag]
    more = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    tool = "deepspeed.checkpoint.ds_to_universal"
    command = [sys.executable, "-m", tool, *map(str, words), *more]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    expected = (folder / source / "expected.safetensors").read_bytes()
    (folder / name / "expected.safetensors").write_bytes(expected)


def pack(folder: Path) -> None:
    """Put the runs into the zip file; runs that were not made anew stay."""
    kept: dict[str, bytes] = {}
    if PACKED.exists():
        with zipfile.ZipFile(PACKED) as old:
            kept = {name: old.read(name) for name in old.namelist()}
    made = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
    kept = {
        name: content for name, content in kept.items() if name.split("/")[0] in {*RUNS, *UNIVERSAL} - made
    }
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py")
    kept |= {str(path.relative_to(folder)): path.read_bytes() for path in files}
    with zipfile.ZipFile(PACKED, "w") as packed:
        for name, content in sorted(kept.items()):
            packed.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)
    print(f"{PACKED.name}: {PACKED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
