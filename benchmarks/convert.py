"""Claim: a model goes from and to Hugging Face's format in little more memory than its largest tensor.

`python benchmarks/convert.py [--mb 600] [--rounds 5] [--folder DIR]` makes a GPT-2 and a Llama of about this
size in fp32, then converts each from Hugging Face and back, and copies the file (`shutil.copyfile`, fsync),
in turns. Every run is a process of its own that reports its wall and CPU time without imports, and the peak
growth of its resident memory. Files are in the page cache when they are read, and on the medium when a run
ends. Each JSON line holds medians over the rounds after the first; the exit status is 1 if a weight came back
changed. Needs Linux, and five times the size on disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WAYS = ("copy", "from-hf", "to-hf")
VOCAB = 16_000
MIB = 1 << 20


def model_of(family: str, megabytes: float):
    """A model of about this size in fp32; the embedding is its largest tensor."""
    from megazero.config.tree.model import ModelConfig

    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "num_query_groups": 4,
    }
    model = ModelConfig(
        num_layers=1,
        hidden_size=1024,
        num_attention_heads=16,
        seq_length=1024,
        ffn_hidden_size=4096,
        **(llama if family == "llama" else {}),
    )
    layer = 1024 * (2 * 1024 + 2 * 64 * model.kv_heads + (3 if family == "llama" else 2) * 4096) * 4
    return model.model_copy(update={"num_layers": max(1, round(megabytes * 1e6 / layer))})


def make(family: str, megabytes: float, folder: Path) -> int:
    """Writes the model in Hugging Face's format, no two tensors alike; returns the largest one's bytes."""
    import torch

    from megazero.checkpoint.disk import Disk
    from megazero.checkpoint.naming import Table
    from megazero.checkpoint.tensor_file import Later, write_tensors
    from megazero.formats.hf.config_json import TokenIds, config_of
    from megazero.spec.resolve import model_spec
    from megazero.train.parts.families import family_of

    model = model_of(family, megabytes)
    links = Table.of(family_of(model).rules, model_spec(model), VOCAB).links

    def later(seed: int, shape: tuple[int, ...]) -> Later:
        def draw() -> torch.Tensor:
            return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))

        return Later(torch.float32, shape, draw)

    folder.mkdir(parents=True)
    tensors = ((link.theirs, later(seed, link.their_shape)) for seed, link in enumerate(links))
    write_tensors(Disk(), folder / "model.safetensors", tensors, metadata={"format": "pt"}, hashed=False)
    config = config_of(family_of(model), model, VOCAB, TokenIds(), "float32")
    (folder / "config.json").write_text(json.dumps(config))
    return max(4 * torch.Size(link.their_shape).numel() for link in links)


def work_of(way: str, folder: Path) -> Callable[[], object]:
    """The work that a run does; whatever it needs is imported before it starts."""
    if way == "copy":
        return lambda: copy(folder / "hf" / "model.safetensors", folder / "copy")
    # Imported by the conversions when they need it; not their time or memory.
    import tokenizers  # noqa: F401

    from megazero.formats.hf.convert import convert_from_hf, convert_to_hf

    if way == "from-hf":
        return lambda: convert_from_hf(folder / "hf", folder / "ours")
    return lambda: convert_to_hf(folder / "ours", folder / "back")


def copy(source: Path, target: Path) -> None:
    """Copies the file; it is on the medium on return."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def status(field: str) -> int:
    """A number of bytes from the kernel's figures for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def measure(way: str, folder: Path, results: multiprocessing.SimpleQueue) -> None:
    """Runs in a process of its own: puts wall and CPU seconds and the growth of resident memory."""
    work = work_of(way, folder)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    start, spent = time.perf_counter(), time.process_time()
    work()
    ended = time.perf_counter() - start, time.process_time() - spent
    results.put((*ended, status("VmHWM") - before))


def clear(folder: Path) -> None:
    """Removes what a round wrote, so that no write-back is pending when the next one begins."""
    for name in ("ours", "back"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "copy").unlink(missing_ok=True)
    os.sync()


def compare(family: str, args: argparse.Namespace, folder: Path) -> bool:
    """Prints one JSON line per way; True if everything came back unchanged."""
    largest = make(family, args.mb, folder / "hf")
    size = (folder / "hf" / "model.safetensors").stat().st_size
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    same = True
    for number in range(args.rounds + 1):
        for way in WAYS:
            results = spawn.SimpleQueue()
            process = spawn.Process(target=measure, args=(way, folder, results))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{way} of {family} ended with status {process.exitcode}")
            found[way].append(results.get())
        if number == 0:
            same = (folder / "hf/model.safetensors").read_bytes() == (
                folder / "back/model.safetensors"
            ).read_bytes()
        clear(folder)
    for way in WAYS:
        wall, cpu = (statistics.median(each[i] for each in found[way][1:]) for i in (0, 1))
        growth = max(each[2] for each in found[way])
        row = {
            "benchmark": "convert",
            "family": family,
            "way": way,
            "mb_per_s": round(size / 1e6 / wall),
            "cpu_seconds_per_gb": round(cpu / size * 1e9, 2),
            "time_to_copy": round(statistics.median(time_to_copy(found, way)), 2),
            "peak_growth_mib": round(growth / MIB),
            "peak_growth_to_largest_tensor": round(growth / largest, 2),
            "seconds": [round(each[0], 2) for each in found[way][1:]],
            "mb": round(size / 1e6),
            "largest_tensor_mib": round(largest / MIB),
            "came_back_equal": same,
        }
        print(json.dumps(row), flush=True)
    return same


def time_to_copy(found: dict[str, list[tuple[float, float, int]]], way: str) -> list[float]:
    """For each counted round, its time as a multiple of the copy's."""
    return [mine[0] / copied[0] for mine, copied in zip(found[way][1:], found["copy"][1:], strict=True)]


def main() -> int:
    """Runs the benchmark; 0 if all weights came back."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=600, help="size of a model in MB")
    parser.add_argument("--rounds", type=int, default=5, help="counted runs of each way")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure (default: a temporary one)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        same = [compare(family, args, Path(scratch) / family) for family in ("gpt2", "llama")]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
