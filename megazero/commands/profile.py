"""The command `megazero profile`: measure this machine, and write it as a device for `megazero plan`."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megazero.commands.outputs import output_file
from megazero.env.gather import host_memory
from megazero.errors import ConfigError, exit_status
from megazero.mpu.cpu_cores import usable_cores
from megazero.mpu.launch import Launch, choose_device
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.torch_group import open_group
from megazero.plan.device import Device, known_devices
from megazero.plan.measure import MachineMeasurements, MeasuredSizes, measure, without_repeats
from megazero.plan.ranks import PATIENCE, on_ranks


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero profile",
        description="Measure products by size and dtype, attention, copies, the cost of an operator, and "
        "calls between ranks by size and number of ranks; print them, and write a device that `megazero plan "
        "--device FILE` reads. All ranks measure at once, as they would train.",
    )
    parser.add_argument("--nproc", type=int, help="ranks that share the machine (default: one per GPU, or 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument(
        "--like",
        choices=known_devices(),
        help="the device whose network, disks and peaks are taken, as they cannot be measured here (default: "
        "the one with the GPU's name, or cpu)",
    )
    parser.add_argument("--output", type=output_file, help="the file to write (.json)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _profile(flags))


def _profile(flags: argparse.Namespace) -> None:
    from megazero.commands.show import print_table

    kind = choose_device(flags.device, 0).type
    ranks = flags.nproc if flags.nproc is not None else (torch.cuda.device_count() if kind == "cuda" else 2)
    most = torch.cuda.device_count() if kind == "cuda" else 64 * usable_cores()
    if not 1 <= ranks <= most:
        raise ConfigError(f"`--nproc` must be from 1 to {most} here, but is {ranks}; correct it")
    like = Device.load(flags.like or name_like(kind))
    measured = MachineMeasurements(**on_ranks(ranks, kind, measured_here))
    device = Device.of(document(measured, like, ranks, kind), "what was measured")
    print(f"{device.name}, {ranks} at once")
    print_table(("what", "size", "reached"), without_repeats(measured.lines), left=2)
    if flags.output is not None:
        flags.output.write_text(json.dumps(device.document(), indent=1) + "\n", encoding="utf-8")
        print(f"written: {flags.output}; use it with `megazero plan --device {flags.output}`")


def measured_here(launch: Launch, torch_device: torch.device) -> dict[str, object]:
    """Measure together with the other ranks of `launch`; returns `MachineMeasurements` as a dict."""
    ranks = tuple(range(launch.world_size))
    alone = launch.world_size == 1
    world = SoloGroup("world") if alone else open_group("world", launch.rank, ranks, PATIENCE)
    return asdict(measure(world, torch_device, MeasuredSizes.of(torch_device)))


def document(measured: MachineMeasurements, like: Device, ranks: int, kind: str) -> dict[str, object]:
    """The measured device's document; it has the figures of `like` for what was not measured."""
    document = like.document()
    rows: Mapping[str, Any] = measured.compute["matmul_mnk_tflop_per_s"]
    memory = host_memory()
    total = min(size for size in (memory.total, memory.limit, 2**50) if size is not None)
    document["host"].update(devices=ranks, memory_gib=round(total / 2**30, 2))
    if kind == "cpu":
        measured.compute["peak_tflop_per_s"] = {dtype: max(row[3] for row in rows[dtype]) for dtype in rows}
        measured.memory["outside_allocator_gib"] = 0.25
        document["name"] = f"cpu of {platform.node()}"
    else:
        total = ranks * torch.cuda.get_device_properties(0).total_memory
        document["name"] = torch.cuda.get_device_name(0)
    likes = like.compute.matmul_like.items()
    measured.compute["matmul_like"] = {
        dtype: row for dtype, row in likes if dtype not in rows and row[0] in rows
    }
    measured.memory["size_gib"] = round(total / ranks / 2**30, 2)
    measured.inside_node["ranks"] = ranks
    for part in ("compute", "memory", "inside_node"):
        document[part].update(getattr(measured, part))
        for key in getattr(measured, part):
            document["sources"][f"{part}.{key}"] = f"measured by `megazero profile`, {ranks} ranks at once"
    return document


def name_like(kind: str) -> str:
    """The name of the known device that is most like this machine's.

    Raises:
        ConfigError: no known device has the GPU's name.
    """
    if kind == "cpu":
        return "cpu"
    gpu = torch.cuda.get_device_name(0).lower().replace(" ", "-")
    names = [name for name in known_devices() if name.split("-")[0] in gpu]
    large = [name for name in names if name.split("-")[-1].removesuffix("g") in gpu]
    if not names:
        raise ConfigError(
            f"`--like` must name one of {', '.join(known_devices())}, as none has the GPU's name, which is "
            f"{gpu}; choose the nearest one"
        )
    return max(large or names, key=len)
