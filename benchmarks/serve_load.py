"""How long clients of `megazero serve` wait: requests that arrive at random, at three rates (open loop).

    python benchmarks/serve_load.py                       # a Llama of 23 million parameters on one process
    python benchmarks/serve_load.py --ranks 2 --rates 1 2 4 --requests 60

Arrivals are a Poisson process of the rate, prompts and lengths are drawn between bounds, decoding is greedy
and ignores the end of a document, so that all amounts are known. For each rate a line of JSON tells requests
and output tokens per second, and p50, p95 of the time to the first token, of the time for each further token,
and of the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.serving.folders import llama_folder
from tests.serving.http.started import started


async def one(client: httpx.AsyncClient, size: int, new: int, after: float) -> tuple[float, float, float]:
    """Ask after a while; seconds to the first token, for each further one, to the end."""
    await asyncio.sleep(after)
    body = {"prompt": [random.randrange(20, 300) for _ in range(size)], "max_tokens": new, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "logprobs": 0}  # with scores every token has its event
    began, first = time.monotonic(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.monotonic()
    end = time.monotonic()
    return first - began, (end - first) / max(1, new - 1), end - began


async def at_rate(url: str, rate: float, flags: argparse.Namespace) -> dict:
    """Figures of one rate."""
    draw, after, tasks, new = random.Random(7), 0.0, [], 0
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)
    ) as client:
        began = time.monotonic()
        for _ in range(flags.requests):
            after += draw.expovariate(rate)
            length = draw.randint(*flags.new)
            new += length
            tasks.append(one(client, draw.randint(*flags.prompt), length, after))
        rows = await asyncio.gather(*tasks)
        seconds = time.monotonic() - began
    figures = {"rate": rate, "requests_per_s": len(rows) / seconds, "output_tokens_per_s": new / seconds}
    for name, values in zip(
        ("first_token_s", "each_token_s", "whole_s"), zip(*rows, strict=True), strict=True
    ):
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        figures |= {f"{name}_p50": cuts[9], f"{name}_p95": cuts[18]}
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="requests per second")
    parser.add_argument("--requests", type=int, default=40, help="at each rate")
    parser.add_argument("--hidden", type=int, default=1280, help="width of the two layers")
    parser.add_argument("--prompt", type=int, nargs=2, default=(16, 128), help="least and most tokens")
    parser.add_argument("--new", type=int, nargs=2, default=(8, 48), help="least and most tokens")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = llama_folder(Path(folder) / "llama", hidden=flags.hidden, positions=512)
        size = ("--tensor-model-parallel-size", str(flags.ranks))
        with started(model, Path(folder) / "log", *size, ranks=flags.ranks) as server:
            asyncio.run(
                at_rate(server.url, max(flags.rates), argparse.Namespace(**{**vars(flags), "requests": 8}))
            )
            for rate in flags.rates:
                print(json.dumps(asyncio.run(at_rate(server.url, rate, flags))), flush=True)


if __name__ == "__main__":
    main()
