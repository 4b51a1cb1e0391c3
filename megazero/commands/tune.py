"""The command `megazero tune`: search the best layouts of a job, by planning them."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megazero.commands.outputs import output_folder
from megazero.commands.training_words import positive, price, training_words
from megazero.config.flags import scan
from megazero.config.resolve import parse_config
from megazero.config.shown import shown_config
from megazero.config.words import split_training_flags
from megazero.errors import ConfigError, exit_status
from megazero.mpu.cpu_cores import usable_cores
from megazero.plan.autotuning import Autotuning
from megazero.plan.device import Device, known_devices
from megazero.plan.kept import KeptPlans
from megazero.plan.layout import Layout
from megazero.plan.measured import measured_steps
from megazero.plan.report import costs, reasons
from megazero.plan.tuning import Planned, Search, best, explore
from megazero.plan.words import money, shown, time_text
from megazero.train.folders import read_folder

DOES_NOT_FIT = 3
_SHOWN = 10
_PLANS = 120
_MOST_ON_CPU = 64


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero tune",
        usage="megazero tune [CONFIG] --gpus N [--device D] [--gpus-per-node G] [--output DIR] [-- FLAGS]",
        description="Look for the layout in which a training is quickest: ranks of a layer, stages and "
        "chunks, experts, ZeRO stage, recomputation and micro-batch. Model, data, "
        "global batch, precision and everything else stay as they are. Nothing is launched.",
        epilog=f"The exit status is 0 if a layout fits, and {DOES_NOT_FIT} if none does.",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file of a training's settings")
    parser.add_argument("--gpus", "--nproc", type=positive, required=True, help="ranks of the training")
    parser.add_argument(
        "--device", default="h100", help=f"{', '.join(known_devices())}, or a file (default: h100)"
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, help="ranks on each node (default: as the device's nodes have)"
    )
    parser.add_argument(
        "--price-per-hour",
        type=price,
        metavar="X",
        help="also say what the training costs at X a device-hour",
    )
    parser.add_argument(
        "--plans", type=positive, help=f"the most layouts that are planned (default: {_PLANS})"
    )
    parser.add_argument(
        "--measure",
        type=positive,
        metavar="N",
        help="train the best N for a few steps on this machine, and compare with the plan",
    )
    parser.add_argument(
        "--output",
        type=output_folder,
        help="a folder for the best layouts as YAML files, and for plans.jsonl, from which a search goes on",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags, and those of a training after ``--``; returns the exit status."""
    own, training = split_training_flags(argv)
    flags = build_parser().parse_args(own)
    return exit_status(lambda: _tune(flags, training))


def _tune(flags: argparse.Namespace, training: Sequence[str] | None) -> int:
    words = training_words(flags.config, training)
    device, json_file = Device.load(flags.device), scan(words).deepspeed_config
    bounds = Autotuning() if json_file is None else Autotuning.read(json_file)
    if bounds.rest is not None:
        words = [_with_json(word, str(json_file), bounds.rest) for word in words]
    if bounds.ignored:
        print(f"without effect on a search on paper: autotuning.{', autotuning.'.join(bounds.ignored)}")
    config = parse_config(words, world_size=flags.gpus, reader=read_folder, only_look=True).config
    per_node = flags.gpus_per_node or device.inside_node.ranks
    search = Search(config, flags.gpus, device, per_node, bounds.space, flags.price_per_hour)
    output = flags.output or (None if bounds.folder is None else Path(bounds.folder))
    kept = None if output is None else _kept(output, search, anew=bounds.anew)
    plans = flags.plans or bounds.plans or _PLANS
    print(f"{sum(1 for _ in search.candidates()):,} layouts; at most {plans:,} are planned", flush=True)
    results = _results(search, plans, bounds.patience, kept)
    if not any(result.fits for result in results) and not search.space.offload:
        print("none fits with its optimizer on the device; now with masters and moments on the host")
        search = replace(search, space=replace(search.space, offload=True))
        results += _results(search, plans, bounds.patience, kept)
    chosen = best(results, max(_SHOWN, flags.measure or 0))
    if not chosen:
        raise ConfigError(
            f"`--gpus` must be a number on which some layout is possible, but {flags.gpus} is not; the rules "
            "refuse all, or their state alone has no room: choose more ranks"
        )
    _show(search, chosen[:_SHOWN])
    if flags.measure is not None:
        _measure(search, chosen[: flags.measure])
    if output is not None:
        _write(search, chosen[:_SHOWN], output)
    return 0 if chosen[0].fits else DOES_NOT_FIT


def _results(search: Search, most: int, patience: int | None, kept: KeptPlans | None) -> list[Planned]:
    """Plan at most `most` layouts, until `patience` in a row are not the best so far; reuse `kept` plans."""
    known = {} if kept is None else kept.known
    results: list[Planned] = []
    quickest, since = math.inf, 0
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(usable_cores()) as pool:

        def plan(layouts: Sequence[Layout]) -> Iterator[Planned]:
            missing = [(search, layout) for layout in layouts if layout not in known]
            yield from [known[layout] for layout in layouts if layout in known]
            for result in filter(None, pool.imap(_plan, missing)):
                if kept is not None:
                    kept.add(result)
                yield result

        for result in explore(search, plan, most):
            results.append(result)
            better = result.fits and result.seconds < quickest
            quickest, since = (result.seconds, 0) if better else (quickest, since + 1)
            if since == patience:
                break
    return results


def _plan(task: tuple[Search, Layout]) -> Planned | None:
    """Plan a layout; returns None if the model cannot be built in it."""
    try:
        return Planned.of(*task)
    except ConfigError:
        return None


def _show(search: Search, chosen: Sequence[Planned]) -> None:
    from megazero.commands.show import print_table

    second = None if search.price is None else search.price * search.ranks / 3600
    rows = [
        (
            str(number),
            str(result.layout),
            shown(result.device_bytes),
            time_text(result.seconds),
            f"{result.tokens_per_second:,.0f}",
            f"{result.mfu:.1%}",
            f"{result.bubble:.1%}",
            *([] if second is None else [money(second * 1e9 / result.tokens_per_second)]),
        )
        for number, result in enumerate(chosen, 1)
    ]
    print()
    heads = ("", "layout", "memory", "step", "tokens/s", "MFU", "bubble")
    print_table((*heads, *([] if second is None else ["1B tokens cost"])), rows, left=2)
    room = search.device.allocator_bytes
    if not chosen[0].fits:
        short = shown(chosen[0].device_bytes - room)
        print(f"none fits: these lack least, the first {short} beyond the {shown(room)} that there are")
        return
    before, after = search.report(), search.report(chosen[0].layout)
    seconds, used = before.times.seconds, before.plan.fullest.device_bytes
    gain = seconds / after.times.seconds
    print(f"\nthe given layout takes {time_text(seconds)} a step and {shown(used)} of {shown(room)}")
    print(f"the first is {gain:.2f} times as fast:")
    for line in reasons(before, after):
        print(f"  {line}")
    if search.price is not None:
        given, first = (money(costs(report)["cost_of_training"]) for report in (before, after))
        print(f"the training costs {given} as given, and {first} in the first")


def _measure(search: Search, chosen: Sequence[Planned]) -> None:
    """Train the layouts on this machine, and print their measured and their planned times."""
    from megazero.commands.show import print_table

    kind = "cuda" if search.device.memory.apart else "cpu"
    most = torch.cuda.device_count() if kind == "cuda" else _MOST_ON_CPU
    if search.ranks > most:
        raise ConfigError(
            f"`--gpus` must be at most {most} with `--measure`, as many as this machine runs, but is "
            f"{search.ranks}; measure a smaller job, or leave `--measure` out"
        )
    measured = measured_steps([search.config(result.layout) for result in chosen], search.ranks, kind)
    rows = [
        (
            str(number),
            str(result.layout),
            time_text(result.seconds),
            time_text(real.seconds),
            f"{time_text(real.least)} to {time_text(real.most)}",
            f"{result.seconds / real.seconds - 1:+.1%}",
        )
        for number, (result, real) in enumerate(zip(chosen, measured, strict=True), 1)
    ]
    print("\nTrained on this machine, a step:\n")
    print_table(("", "layout", "planned", "measured", "in all rounds", "off"), rows, left=2)


def _write(search: Search, chosen: Sequence[Planned], folder: Path) -> None:
    for number, result in enumerate(chosen, 1):
        head = f"# {result.layout}: {time_text(result.seconds)} a step\n"
        text = head + shown_config(search.config(result.layout), search.ranks)
        (folder / f"{number:02}.yaml").write_text(text, encoding="utf-8")
    print(f"written: {folder}/01.yaml to {len(chosen):02}.yaml, {folder}/plans.jsonl")


def _kept(folder: Path, search: Search, *, anew: bool) -> KeptPlans:
    kept = KeptPlans(folder / "plans.jsonl", search, anew=anew)
    if kept.others:
        print(f"{kept.path} keeps {kept.others:,} plans of other jobs or devices, not used here")
    return kept


def _with_json(word: str, path: str, content: str) -> str:
    """Replace the path of a file in an argument, `PATH` or `--flag=PATH`, by the file's content."""
    flag, sign, value = word.rpartition("=")
    return f"{flag}{sign}{content}" if value == path else word
