"""Routing by the ids of tokens, in the first layers with experts: a fixed table says which experts each has.

As in Hash Layers (Roller et al. 2021) nothing is learned about the choice; the router's scores weigh the
experts, as in DeepSeek-V4 and Megatron-LM's `--moe-n-hash-layers`. The table is a function of the layer's
number, so that no checkpoint holds it and no seed changes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.layers.rows import Rows
from megazero.moe.router import Noise, Router
from megazero.moe.tokens import Tokens
from megazero.mpu.rng import site_key
from megazero.ops.counter_random import derive, hash_uniform
from megazero.spec.experts import RouterSpec


def expert_table(layer: int, experts: int, choices: int, ids: int, device: torch.device) -> Tensor:
    """int64 [ids or more, choices], the experts of each id: random ones, evenly loaded by every run of ids.

    Each run of as many ids as there are experts is put in a random order, and so are the experts; an id has
    the expert at its place, and those that follow. So a run has each expert `choices` times. Neighbouring ids
    are about equally frequent in most vocabularies, so that loads are about even in a text, too.
    """
    runs, members = torch.arange(-(-ids // experts), device=device), torch.arange(experts, device=device)

    def order(of: str) -> Tensor:
        keys = derive(site_key("hashed router", layer, of), runs)
        return hash_uniform(keys.unsqueeze(1), members).argsort(stable=True, dim=1)

    places = (order("ids").unsqueeze(2) + torch.arange(choices, device=device)) % experts
    return order("experts").gather(1, places.flatten(1)).view(-1, choices)


def ids_of(tokens: Tokens, rows: Rows) -> Tensor:
    """int64 [n], the ids of a rank's share of the tokens, which are of its own columns."""
    assert rows.ids is not None, "whoever routes by ids gives them"
    column, spread = tokens.number // len(rows.ids), rows.spread
    if spread.cp.size > 1:
        columns = spread.own_columns(torch.arange(rows.whole_length, device=column.device))
        column = torch.searchsorted(columns, column)  # an own column's place among them
    return rows.ids[tokens.sequence, column]


class HashedRouter(Router):
    """A router that looks up which experts a token has, and scores these.

    Args:
        layer, weight, spec, logit_bias: as for `Router`.
        ids: number of ids that tokens may have.
    """

    def __init__(
        self,
        layer: int,
        weight: nn.Parameter,
        spec: RouterSpec,
        logit_bias: nn.Parameter | None,
        ids: int,
    ):
        super().__init__(layer, weight, spec, logit_bias)
        self.ids = ids
        self._table: Tensor | None = None

    def _choose(self, ranking: Tensor, noise: Noise) -> Tensor:
        if self._table is None or self._table.device != ranking.device:
            with torch.inference_mode(False):  # it outlives a generation, and a training may follow
                k, device = self.spec.topk, ranking.device
                self._table = expert_table(self.layer, self.experts, k, self.ids, device)
        return self._table[ids_of(noise.tokens, noise.rows)]
