"""The oracle's hybrid model: layers of one part each, and Mamba-2 as its recurrence reads, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.model import Flags, Model, Text, Weights

TAPS = 4


def heads_of(flags: Flags) -> int:
    """Heads of a Mamba-2 layer."""
    return flags.get("mamba-num-heads", 2 * flags["hidden-size"] // flags["mamba-head-dim"])


class HybridModel(Model):
    """A GPT whose layers are what the letters of its pattern say."""

    def _parts(self, i: int) -> Sequence[tuple[str, str, Callable[[Weights, int, Tensor, Text], Tensor]]]:
        letter = self.flags["hybrid-layer-pattern"][i]
        kind, work = {
            "M": ("attention", self._mamba),
            "*": ("attention", self._attention),
            "-": ("mlp", self._mlp),
        }[letter]
        return (("input_norm", kind, work),)

    def _mamba(self, w: Weights, i: int, x: Tensor, text: Text) -> Tensor:
        """x [b, s, h]; all groups g of r heads at once."""
        name, flags = f"layers.{i}.mamba", self.flags
        g, p, n = flags["mamba-num-groups"], flags["mamba-head-dim"], flags["mamba-state-dim"]
        r = heads_of(flags) // g
        made = torch.einsum("bsh,goh->bsgo", x, w[f"{name}.input.weight"])
        gate, mixed, steps = made.split((r * p, r * p + 2 * n, r), -1)
        steps = torch.log1p((steps + w[f"{name}.dt_bias"]).exp())
        rates, documents = -w[f"{name}.a_log"].exp(), text.documents
        state, rows = torch.zeros(x.shape[0], g, r, p, n, dtype=x.dtype), []
        for t in range(x.shape[1]):
            near = w[f"{name}.conv.bias"].expand(x.shape[0], -1, -1)
            for back in range(min(TAPS, t + 1)):
                seen = mixed[:, t - back] * w[f"{name}.conv.weight"][..., -1 - back]
                near = near + seen * _same(documents, t, back, seen)
            value, write, read = F.silu(near).split((r * p, n, n), -1)
            value, step = value.unflatten(-1, (r, p)), steps[:, t]
            if t > 0:
                state = state * _same(documents, t, 1, state)
            decay, added = (step * rates).exp(), step[..., None] * value
            state = decay[..., None, None] * state + added[..., None] * write[:, :, None, None]
            read_out = torch.einsum("bgrpn,bgn->bgrp", state, read)
            rows.append(read_out + w[f"{name}.skip"][..., None] * value)
        y = torch.stack(rows, 1).flatten(-2) * F.silu(gate)
        normed = y / (y.square().mean(-1, keepdim=True) + flags["norm-epsilon"]).sqrt()
        return F.linear((normed * w[f"{name}.norm.weight"]).flatten(2), w[f"{name}.output.weight"])


def _same(documents: Tensor, t: int, back: int, like: Tensor) -> Tensor:
    """1 in the rows [b, ...] where a token is of the document of the one `back` before it."""
    same = (documents[:, t] == documents[:, t - back]).to(like.dtype)
    return same.view(-1, *[1] * (like.dim() - 1))
