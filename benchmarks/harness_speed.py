"""Requests per second of lm-evaluation-harness's methods here, and with transformers on the same model.

    python benchmarks/harness_speed.py --output /tmp/lm_eval_speed

writes a model of 20 million parameters (8 layers of width 448), and lets both score the same requests in
turns, in one process and in fp32: four endings of long contexts, as in HellaSwag, the choices A to D of
questions behind shared examples, as in MMLU, and whole documents, as in Wikitext. transformers takes the best
of its batch sizes 1, 8 and 32, found beforehand. Prints medians of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WORDS = ["river", "lamp", "miller", "garden", "horse", "bridge", "clock", "market", "winter", "stone", "hill"]


def words(draw: random.Random, count: int) -> str:
    """Text of so many words."""
    return " ".join(draw.choice(WORDS) for _ in range(count))


def requests_of(kind: str, count: int) -> list[Any]:
    """Requests as the harness makes them."""
    from lm_eval.api.instance import Instance

    draw, rows = random.Random(4), []
    shots = "\n\n".join(f"{words(draw, 24)}\nAnswer: {letter}" for letter in "ABCDA")
    for _ in range(count):
        if kind == "endings":
            context = words(draw, 90)
            rows += [(context, f" {words(draw, draw.randint(8, 24))}") for _ in range(4)]
        elif kind == "letters":
            context = f"{shots}\n\n{words(draw, 30)}\nAnswer:"
            rows += [(context, f" {letter}") for letter in "ABCD"]
        else:
            rows.append((words(draw, draw.randint(100, 1500)),))
    method = "loglikelihood_rolling" if kind == "documents" else "loglikelihood"
    return [Instance(request_type=method, doc={}, arguments=row, idx=i) for i, row in enumerate(rows)]


def write_model(folder: Path) -> None:
    """Write the model and a tokenizer."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, pre_tokenizers

    names = ["<|endoftext|>", "\u010a", *sorted({f"\u0120{word}" for word in WORDS}), *WORDS]
    alphabet = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in names]
    vocabulary = {name: i for i, name in enumerate([*names, *alphabet])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="A", continuing_subword_prefix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=448,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def seconds(model: Any, requests: list[Any]) -> float:
    """The processor's time that a model takes for requests: other programs do not add to it."""
    began = time.process_time()
    getattr(model, requests[0].request_type)(requests, disable_tqdm=True)
    return time.process_time() - began


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="contexts or documents of each kind")
    flags = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    from megazero.inference import harness_model

    write_model(flags.output)
    ours = harness_model(load=str(flags.output))
    assert ours is not None, "this is one process"
    theirs = HFLM(pretrained=str(flags.output), dtype="float32", device="cpu", batch_size=1)
    for kind in ("endings", "letters", "documents"):
        requests = requests_of(kind, flags.requests if kind != "documents" else flags.requests // 3)
        few = requests[: len(requests) // 3]
        times = {}
        for size in (1, 8, 32):
            theirs.batch_size_per_gpu = size
            times[size] = seconds(theirs, few)
        theirs.batch_size_per_gpu = min(times, key=times.__getitem__)
        seconds(ours, few)
        pairs = [(seconds(theirs, requests), seconds(ours, requests)) for _ in range(flags.turns)]
        ratios = sorted(one / other for one, other in pairs)
        one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{kind:9} {len(requests):4} requests: transformers {one:6.2f} s (batch size "
            f"{theirs.batch_size_per_gpu}), megazero {other:6.2f} s; ratio {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
