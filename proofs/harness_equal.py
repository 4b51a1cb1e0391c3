"""Shows that lm-evaluation-harness gives a model the same scores here as with transformers, on every layout.

    python proofs/harness_equal.py --output /tmp/equal

writes a small dense model and one with experts as Hugging Face folders, scores both by the eight tasks in
tests/harness/tasks with the harness's own `hf` model in fp32 on the CPU, and then with ours on 1, T2, P2,
T2 x P2, cp 2, D2 and, with experts, E2 ranks. Of every request it compares log-likelihoods (relative to
their sums), whether the answer is the most likely one, and generated texts; and all metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "tests/harness/tasks"
NAMES = ("rolling", "cloze", "endings", "science", "goals", "yesno", "reading", "sums")
AXES = {
    "T": "tensor_model_parallel_size",
    "P": "pipeline_model_parallel_size",
    "C": "context_parallel_size",
    "E": "expert_model_parallel_size",
}
LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "T2": {"T": 2},
    "P2": {"P": 2},
    "T2P2": {"T": 2, "P": 2},
    "cp2": {"C": 2},
    "D2": {"D": 2},
    "T2D2": {"T": 2, "D": 2},
}
WITH_EXPERTS = {"1": {}, "E2": {"E": 2}, "E2D2": {"E": 2, "D": 2}}
_CLOSE = 1e-6


def tasks_in(folder: Path) -> Path:
    """Copy the task files to a folder, with the paths of their data."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        text = (TASKS / f"{name}.yaml").read_text()
        (folder / f"{name}.yaml").write_text(text.replace(f"{name}.jsonl", str(TASKS / f"{name}.jsonl")))
    return folder


def write_models(folder: Path) -> dict[str, Path]:
    """Write the two models, with a tokenizer trained on the tasks."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    backend.train([str(path) for path in TASKS.glob("*.jsonl")], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    sizes: dict[str, Any] = {
        **{"vocab_size": len(backend.get_vocab()), "hidden_size": 64, "intermediate_size": 96},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{
            "max_position_embeddings": 256,
            "initializer_range": 0.12,
            "eos_token_id": 0,
            "bos_token_id": None,
        },
    }
    torch.manual_seed(5)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    )
    paths = {}
    for name, model in (("dense", dense), ("experts", experts)):
        paths[name] = folder / name
        model.save_pretrained(paths[name])
        tokenizer.save_pretrained(paths[name])
    return paths


def evaluated(model: Any, tasks: Path, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """The metrics of all tasks, and what the model answered to each request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[f"local_{name}" for name in NAMES],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=8,
        device="cpu",
        bootstrap_iters=0,
    )
    answers = {
        name: [list(sample["resps"]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in results["samples"].items()
    }
    metrics = {
        f"{task}/{name}": value
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    return json.loads(json.dumps({"answers": answers, "metrics": metrics}))


def work(load: str, sizes: dict[str, int], tasks: Path, output: Path) -> None:
    """Be one rank of ours."""
    from megazero.inference import harness_model

    model = harness_model(load=load, **{AXES[axis]: size for axis, size in sizes.items() if axis != "D"})
    if model is not None:
        output.write_text(json.dumps(evaluated(model, tasks)))
        model.close()


def on_ranks(load: Path, sizes: dict[str, int], tasks: Path, output: Path) -> dict[str, Any]:
    """What ours answers on a layout."""
    world = 1
    for size in sizes.values():
        world *= size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        environment = {name: str(value) for name, value in place.items()} if world > 1 else {}
        words = ["--worker", str(load), "--sizes", json.dumps(sizes), "--tasks", str(tasks)]
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, *words, "--output", str(output)],
                env={**os.environ, "MASTER_ADDR": "127.0.0.1", **environment},
                stderr=subprocess.DEVNULL if rank else None,
            )
        )
    if any(rank.wait() for rank in ranks):
        raise SystemExit(f"a rank of {sizes} failed")
    return json.loads(output.read_text())


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[float, int, list[str]]:
    """The largest relative difference of log-likelihoods, their number, and what differs otherwise."""
    largest, count, wrong = 0.0, 0, []
    for task, documents in theirs["answers"].items():
        pairs = zip(documents, ours["answers"][task], strict=True)
        for number, (one, other) in enumerate(pairs):
            for (a, *_), (b, *_) in zip(one, other, strict=True):
                if isinstance(a, str):
                    wrong += [f"{task} {number}: {a!r}, not {b!r}"] if a != b else []
                    continue
                (a, *likely), (b, *also) = (x if isinstance(x, list) else [x] for x in (a, b))
                largest, count = max(largest, abs(a - b) / max(abs(a), 1e-9)), count + 1
                wrong += [f"{task} {number}: greedy is {likely}, not {also}"] if likely != also else []
    for name, value in theirs["metrics"].items():
        exact = "perplexity" not in name and "bits" not in name
        if abs(value - ours["metrics"][name]) > (0 if exact else 1e-5 * abs(value)):
            wrong.append(f"{name}: {value}, not {ours['metrics'][name]}")
    return largest, count, wrong


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--only", nargs="*", help="layouts, such as T2")
    for hidden in ("--worker", "--sizes", "--tasks"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        work(flags.worker, json.loads(flags.sizes), Path(flags.tasks), flags.output)
        return 0
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    shutil.rmtree(flags.output, ignore_errors=True)
    tasks, models = tasks_in(flags.output / "tasks"), write_models(flags.output)
    failed = False
    for name, path in models.items():
        theirs = evaluated("hf", tasks, {"pretrained": str(path), "dtype": "float32"})
        for layout, sizes in (LAYOUTS if name == "dense" else WITH_EXPERTS).items():
            if flags.only and layout not in flags.only:
                continue
            ours = on_ranks(path, sizes, tasks, flags.output / f"{name}-{layout}.json")
            largest, count, wrong = compare(theirs, ours)
            failed |= bool(wrong) or largest > _CLOSE
            verdict = "equal" if not wrong else "differ: " + "; ".join(wrong[:4])
            print(
                f"{name:8} {layout:5} {count} log-likelihoods, largest difference {largest:.1e}; "
                f"{len(theirs['metrics'])} metrics {verdict}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
