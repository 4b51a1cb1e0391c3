"""Rollout and update of GRPO: processor seconds of a step, beside TRL's GRPOTrainer with transformers.

    python benchmarks/policy.py --python /path/to/a/venv/with/trl/bin/python

Both answer the same prompts of a Llama of about 20M parameters with random weights, 8 answers to each of 4
prompts, 64 tokens each, in fp32 on one thread, without a reference, and make one update. A step's time is the
difference between a run of 5 steps and one of 2, over 3; contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GROUP, PROMPTS, ANSWER, VOCABULARY = 8, 4, 64, 8192
STEPS = (2, 5)
MODEL = f"""
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
words = {{f"w{{i}}": i for i in range({VOCABULARY} - 2)}}
words |= {{"<eos>": {VOCABULARY} - 2, "<pad>": {VOCABULARY} - 1}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
whole.save_pretrained(sys.argv[1])
set_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size={VOCABULARY}, hidden_size=384, intermediate_size=1024,
    num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=128,
    tie_word_embeddings=True, bos_token_id=None, eos_token_id={VOCABULARY} - 2,
    pad_token_id={VOCABULARY} - 1)).save_pretrained(sys.argv[1])
"""
THEIRS = f"""
import sys
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
torch.set_num_threads(1)
folder, steps = sys.argv[1], int(sys.argv[2])
def reward(completion_ids, **rest):
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]
rows = [{{"prompt": f"w{{i}} w{{i + 1}} w{{i + 2}} w{{i + 3}}"}} for i in range(64)]
config = GRPOConfig(output_dir=folder + "/out", max_steps=steps, num_generations={GROUP},
    per_device_train_batch_size={GROUP * PROMPTS}, max_completion_length={ANSWER}, beta=0.0, use_cpu=True,
    report_to=[], save_strategy="no", bf16=False, learning_rate=1e-6, gradient_checkpointing=False,
    disable_tqdm=True, model_init_kwargs={{"dtype": "float32"}})
GRPOTrainer(folder, reward, config, Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left")).train()
"""
OURS = (
    f"--tokenizer-type HFTokenizer --policy-method grpo --group-size {GROUP} --max-answer-tokens {ANSWER} "
    f"--micro-batch-size {GROUP * PROMPTS} --global-batch-size {GROUP * PROMPTS} --lr 1e-6 --seq-length 128 "
    "--lr-decay-style constant --device cpu --log-interval 1"
)


def seconds(command: list[str]) -> float:
    """The processor seconds that a command takes, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure both in turns, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True, help="a Python that has trl")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([flags.python, "-c", MODEL, folder], check=True)
        place = Path(folder)
        rows = [json.dumps({"prompt": f"w{i} w{i + 1} w{i + 2} w{i + 3}"}) for i in range(64)]
        (place / "prompts.jsonl").write_text("\n".join(rows))
        (place / "reward.py").write_text(
            "def odd(completion_ids, **rest):\n"
            "    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]\n"
        )
        files = ["--load-hf", folder, "--tokenizer-model", folder, "--prompts", str(place / "prompts.jsonl")]
        files += ["--reward-functions", f"{place / 'reward.py'}:odd"]

        def step(run: list[list[str]]) -> float:
            short, long = (seconds(command) for command in run)
            return (long - short) / (STEPS[1] - STEPS[0])

        ours = [
            [sys.executable, "-m", "megazero.cli", "rl", *OURS.split(), *files, "--train-iters", str(n)]
            for n in STEPS
        ]
        theirs = [[flags.python, "-c", THEIRS, folder, str(n)] for n in STEPS]
        times: dict[str, list[float]] = {"megazero": [], "TRL": []}
        for _ in range(flags.rounds):
            times["megazero"].append(step(ours))
            times["TRL"].append(step(theirs))
            print(json.dumps({name: [round(t, 2) for t in own] for name, own in times.items()}), flush=True)
    medians = {name: statistics.median(own) for name, own in times.items()}
    print(f"step: megazero {medians['megazero']:.2f} s, TRL {medians['TRL']:.2f} s, ratio "
          f"{medians['TRL'] / medians['megazero']:.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
