"""A crowd of clients on one server: every text is what the same request gets when it is alone.

    python proofs/serve_crowd.py --minutes 10
    python proofs/serve_crowd.py --minutes 2 --clients 16 --axis pipeline

Starts `megazero serve` for a small Llama on two ranks with few pages, so that requests wait and give up their
places. Clients come and go at random: of different prompts, some with a common beginning, lengths, seeds and
stop strings, whole or as a stream; one in six leaves before it has its answer. Each request belongs to a list
of which every answer was taken alone before. At the end nothing may run, wait or hold a page, and the memory
of the ranks must not have grown since the first minute by more than a tenth. Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.serving.folders import llama_folder
from tests.serving.http.started import Started, started

WORDS = ("the capital of", "France is", "Paris,", "I think.", "And of Italy?", "Rome", "🙂", "私は")


def requests(count: int, seed: int) -> list[dict]:
    """Requests of many kinds; a third begin with the same long prompt."""
    draw, made = random.Random(seed), []
    head = " ".join(WORDS) * 3
    for i in range(count):
        prompt = " ".join(draw.choices(WORDS, k=draw.randrange(1, 15)))
        body = {
            "prompt": head + prompt if i % 3 == 0 else prompt,
            "max_tokens": draw.randrange(1, 60),
            "seed": i,
        }
        body |= {"temperature": 0} if i % 4 == 0 else {"top_p": 0.9, "top_k": 40}
        body |= {"stop": [draw.choice("aeio")]} if i % 5 == 0 else {}
        made.append({**body, "ignore_eos": i % 2 == 0})
    return made


async def answer(client: httpx.AsyncClient, body: dict, leave_after: float | None = None) -> str | None:
    """The text of a request, by a stream if its seed is odd; None for one that has left."""
    try:
        async with asyncio.timeout(leave_after):
            if body["seed"] % 2 == 0:
                sent = await client.post("/v1/completions", json=body)
                return sent.raise_for_status().json()["choices"][0]["text"]
            text = ""
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            return text
    except TimeoutError:
        return None


async def crowd(server: Started, flags: argparse.Namespace) -> dict:
    """Run the crowd; return what was seen."""
    bodies, draw, seen = requests(flags.kinds, 1), random.Random(2), Counter()
    limits = httpx.Limits(max_connections=None)
    memory: list[int] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        alone = [await answer(client, body) for body in bodies]
        end = time.monotonic() + 60 * flags.minutes

        async def one() -> None:
            while time.monotonic() < end:
                i = draw.randrange(len(bodies))
                leaves = draw.uniform(0.0, 1.0) if draw.random() < 1 / 6 else None
                text = await answer(client, bodies[i], leaves)
                seen["left" if text is None else "equal" if text == alone[i] else "different"] += 1
                await asyncio.sleep(draw.expovariate(1 / 0.2))

        async def watch() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(min(30.0, 6 * flags.minutes))
                memory.append(sum(resident(rank) for rank in server.ranks()))

        await asyncio.gather(watch(), *(one() for _ in range(flags.clients)))
        await asyncio.sleep(2)
        metrics = (await client.get("/metrics")).text
    values = {name: float(value) for name, value in re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", metrics, re.M)}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    return {
        **seen,
        **{name: values[name] for name in (*names, "generation_tokens_total", "prefix_cache_hits_total")},
        "memory_mib": [round(size / 2**20) for size in memory],
    }


def resident(process: int) -> int:
    """The bytes of a process's memory."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def main() -> int:
    """Run the proof; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kinds", type=int, default=200, help="different requests")
    parser.add_argument("--axis", choices=["tensor", "pipeline"], default="tensor", help="over two ranks")
    parser.add_argument("--pages", type=int, default=96)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = llama_folder(Path(folder) / "tiny")
        size = (
            f"--{flags.axis}-model-parallel-size",
            "2",
            "--kv-pages",
            str(flags.pages),
            "--page-size",
            "16",
        )
        with started(model, Path(folder) / "log", *size, ranks=2) as server:
            seen = asyncio.run(crowd(server, flags))
            print(json.dumps(seen), flush=True)
            server.end()
    memory = seen["memory_mib"]
    idle = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    sound = not seen.get("different") and not any(seen[name] for name in idle)
    return 0 if sound and memory[-1] <= 1.1 * memory[min(1, len(memory) - 1)] else 1


if __name__ == "__main__":
    sys.exit(main())
