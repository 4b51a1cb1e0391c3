"""A Mamba-2 mixer on the CPU: does its scan by matrix products leave anything for a kernel to save?

    OMP_NUM_THREADS=1 python benchmarks/state_space.py
    OMP_NUM_THREADS=1 python benchmarks/state_space.py --hidden 2048 --length 4096

Times a forward and a backward pass of the mixer's parts, for one sample: the scan by chunks of each size,
the convolution, the two projections, and the whole mixer. `row by row` is the recurrence's forward pass
alone, a few operators of torch for each row. Contenders take turns in each round; times are medians over
rounds of the process's processor time, and shares are medians of the rounds' ratios to the whole mixer. One
JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megazero.config.tree.model import ModelConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.layers.state_space.convolution import causal_convolution
from megazero.layers.state_space.mixer import Mamba2
from megazero.layers.state_space.scan import selective_scan
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec

CHUNKS = (32, 64, 128, 256)


def contenders(config: ModelConfig) -> dict[str, Callable[[], None]]:
    """Steps by name, of one sample of the model's length."""
    context = solo_context()
    mixer = Mamba2(0, model_spec(config).layers[0].mixer, Placement.of(context, torch.float32))
    initialize(mixer, 1, context.place)
    s, g, p, n = config.seq_length, config.mamba_num_groups, config.mamba_head_dim, config.mamba_state_dim
    r = config.mamba_width // p // g

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(s, 1, *shape, requires_grad=True)

    hidden, inner = leaf(config.hidden_size), leaf(config.mamba_width)
    x, dt, b, c, mixed = leaf(g, r, p), leaf(g, r), leaf(g, n), leaf(g, n), leaf(g, r * p + 2 * n)
    rates = -mixer.a_log.detach().exp()
    inputs = LayerInputs(Rows(range(s)))

    def scan(chunk: int) -> Callable[[], None]:
        return lambda: selective_scan(x, F.softplus(dt), rates, b, c, chunk=chunk)[0].sum().backward()

    @torch.no_grad()
    def row_by_row() -> None:
        state, steps = torch.zeros(1, g, r, p, n), F.softplus(dt)
        for t in range(s):
            decay = (steps[t] * rates).exp()[..., None, None]
            state = state * decay + (steps[t][..., None] * x[t])[..., None] * b[t][:, :, None, None]
            (state @ c[t][:, :, None, :, None]).squeeze(-1)

    def projections() -> None:
        (mixer.input(hidden).sum() + mixer.output(inner)[0].sum()).backward()

    def convolution() -> None:
        causal_convolution(mixed, mixer.conv_weight, mixer.conv_bias)[0].sum().backward()

    return {
        "mixer": lambda: mixer(hidden, inputs)[0].sum().backward(),
        "projections": projections,
        "convolution": convolution,
        **{f"scan by {chunk}": scan(chunk) for chunk in CHUNKS},
        "row by row, forward": row_by_row,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = ModelConfig(
        hidden_size=args.hidden, num_attention_heads=8, seq_length=args.length, hybrid_layer_pattern="M"
    )
    steps = contenders(config)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            times[name].append(time.process_time() - begin)
    for name, own in times.items():
        shares = [one / whole for one, whole in zip(own, times["mixer"], strict=True)]
        line = {"part": name, "seconds": round(statistics.median(own), 3)}
        share = round(statistics.median(shares), 2)
        print(json.dumps({**line, "share": share, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
