"""Tokens per second of `serving.complete` beside the continuous batching of transformers.

    OMP_NUM_THREADS=1 python benchmarks/serving.py
    OMP_NUM_THREADS=1 python benchmarks/serving.py --alone --profile

One Llama of 20 million parameters and random weights, the same in both; 64 requests with prompts of 16 to
256 tokens and 16 to 128 greedy tokens each, none ended by a token. Both get all requests at once, and have
been warmed up by the same requests. Transformers gets pages for all requests and the same most tokens of a
step. They take turns in one process. Times are by the clock, or with --processor of the process's processor
time, for a machine that has other work. One JSON line: the medians of output tokens per second, and the
median of the rounds' ratios with its range.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero.config.tree.model import ModelConfig
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context
from megazero.serving.engine import EngineLimits, complete
from megazero.serving.wanted import Wanted
from megazero.spec.resolve import model_spec
from tests.models.hf_weights import global_weights, llama_model, to_theirs

VOCAB = 8192
LLAMA = ModelConfig(
    num_layers=8,
    hidden_size=384,
    num_attention_heads=6,
    num_query_groups=6,
    ffn_hidden_size=1024,
    seq_length=512,
    init_method_std=0.05,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
Requests = list[tuple[list[int], int]]
Run = Callable[[], list[list[int]]]


def requests(count: int, seed: int = 0) -> Requests:
    """Prompts with the numbers of tokens to draw."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(16, 256))], rng.randint(16, 128))
        for _ in range(count)
    ]


def our_model() -> GPT:
    """The model with weights of seed 1."""
    context = solo_context()
    model = GPT(Slice(model_spec(LLAMA), (VOCAB, VOCAB), Placement.of(context, torch.float32)))
    initialize(model, 1, context.place)
    return model


def ours(model: GPT, wanted: Requests, tokens: int) -> Run:
    """Answer the requests by an engine of megazero."""
    greedy = Sampling(greedy=True)
    limits = EngineLimits(max_length=512, pages=1024, tokens_per_step=tokens)

    def run() -> list[list[int]]:
        told = complete(StagedModel.whole(model), [Wanted(tuple(p), n, greedy) for p, n in wanted], limits)
        return [[token.id for token in one.tokens] for one in told]

    return run


def theirs(model: GPT, wanted: Requests, tokens: int) -> Run:
    """Answer the requests by transformers, on the same weights."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    copy = llama_model(LLAMA, VOCAB)
    copy.load_state_dict(to_theirs(global_weights(model, solo_context().groups), LLAMA, VOCAB))
    copy.set_attn_implementation("sdpa")
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=128)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=tokens)

    def run() -> list[list[int]]:
        manager = copy.init_continuous_batching(generation, batching)
        manager.start()
        names = [manager.add_request(prompt, max_new_tokens=new) for prompt, new in wanted]
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                done[result.request_id] = result.generated_tokens
        manager.stop(block=True)
        return [done[name] for name in names]

    return run


def main() -> None:
    """Time both in turns, or ours alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="leave transformers out")
    parser.add_argument("--processor", action="store_true", help="measure processor time")
    parser.add_argument("--profile", action="store_true", help="print where our time goes")
    flags = parser.parse_args()
    clock = time.process_time if flags.processor else time.perf_counter
    model, wanted = our_model(), requests(flags.requests)
    new = sum(count for _, count in wanted)
    runs = {"megazero": ours(model, wanted, flags.tokens)}
    if not flags.alone:
        runs["transformers"] = theirs(model, wanted, flags.tokens)
    answers = {name: run() for name, run in runs.items()}
    line: dict[str, object] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "output_tokens": new,
    }
    if not flags.alone:
        same = [a == b for a, b in zip(answers["megazero"], answers["transformers"], strict=True)]
        line["equal_texts"] = sum(same)
    if flags.profile:
        with cProfile.Profile() as profile:
            runs["megazero"]()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(flags.rounds):
        for name, run in runs.items():
            start = clock()
            run()
            rates[name].append(new / (clock() - start))
    line |= {name: round(statistics.median(values), 1) for name, values in rates.items()}
    if not flags.alone:
        ratios = [a / b for a, b in zip(rates["megazero"], rates["transformers"], strict=True)]
        line |= {"ratio": round(statistics.median(ratios), 3), "from": min(ratios), "to": max(ratios)}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
