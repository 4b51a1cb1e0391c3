"""Compares keys and values in 8 bits with those in full precision: bytes, log-likelihood, speed.

    python benchmarks/kv_cache.py out/quickstart/steps-* --data out/quickstart/stdlib_text_document

Samples of the dataset are scored through the engine, so that each token follows what the cache keeps of those
before it.
Texts are generated in turns; speed is the ratio of the medians of processor time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time

import torch

from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.models.language_model import LanguageModel
from megazero.mpu.launch import Launch
from megazero.quantize.blocks import BlockModel
from megazero.serving.engine import Engine, EngineLimits
from megazero.serving.wanted import PromptScores, Wanted
from megazero.train.resume.trained import AxisSizes, load_for_inference


def scored(model: StagedModel[Batch], texts: list[list[int]], page: int) -> tuple[float, int]:
    """The mean loss of a token in nats, and the bytes of all pages, of which there are just enough."""
    length = max(map(len, texts))
    pages = len(texts) * -(-length // page)
    engine = Engine(model, EngineLimits(length, pages, page, max_running=min(64, len(texts))))
    losses: list[float] = []

    def listen(event: object) -> None:
        if isinstance(event, PromptScores):
            losses.extend(-(token.logprob or 0.0) for token in event.tokens if token is not None)

    engine.submit([Wanted(tuple(text), 0, prompt_logprobs=0) for text in texts], [listen] * len(texts))
    engine.run()
    buffers = engine._runner._buffers
    assert buffers is not None, "the model's keys lie in pages"
    return statistics.fmean(losses), buffers.bytes


def seconds(model: StagedModel[Batch], rows: int, prompt: int, new: int) -> float:
    """Processor time of generating some tokens for each of some prompts."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(prompt)] for _ in range(rows)]
    began = time.process_time()
    generate(model, prompts, max_new_tokens=new, sampling=Sampling(greedy=True))
    return time.process_time() - began


def main() -> None:
    """Measure all runs, and print a table of losses and one of speeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, or checkpoints")
    parser.add_argument("--data", required=True, help="the dataset of the trainings")
    parser.add_argument("--samples", type=int, default=64, help="samples that are scored (default 64)")
    parser.add_argument("--new", type=int, default=32, help="tokens that are generated (default 32)")
    parser.add_argument("--turns", type=int, default=3, help="turns of the speeds (default 3)")
    flags = parser.parse_args()
    print("| run | page | bytes, of all pages | perplexity | in 8 bits | change |")
    print("|---|---|---|---|---|---|")
    for run in flags.runs:
        with BlockModel.opened(run, torch.device("cpu")) as opened:
            _, held_out = opened.samples(flags.data, None, (1, flags.samples))
            assert held_out is not None, "the dataset has held-out samples"
            batches = held_out.batches(range(held_out.count))
        texts = [batch.tokens[0].tolist() for batch in batches]
        loaded = load_for_inference(run, Launch.from_environment(), AxisSizes())
        chunks = {number: LanguageModel.of(chunk) for number, chunk in loaded.chunks.items()}
        model: StagedModel[Batch] = StagedModel(chunks, loaded.stage_of, loaded.context.pp)
        for page in (16, 32):
            model.coded_cache = False
            before, plain = scored(model, texts, page)
            model.coded_cache = True
            after, coded = scored(model, texts, page)
            change = 100 * (math.exp(after - before) - 1)
            print(
                f"| {run} | {page} | {coded / plain:.3f} | {math.exp(before):.3f} | {math.exp(after):.3f} | "
                f"{change:+.3f}% |",
                flush=True,
            )
        for rows, prompt in ((1, 64), (16, 64)):
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(flags.turns):
                for coded_cache, taken in times.items():
                    model.coded_cache = coded_cache
                    taken.append(seconds(model, rows, prompt, flags.new))
            ratio = statistics.median(times[True]) / statistics.median(times[False])
            print(f"{rows} rows, {flags.new} tokens after {prompt}: {ratio:.2f} times the time", flush=True)


if __name__ == "__main__":
    main()
