"""Hash routing: in the first layers with experts, a fixed table maps each token id to its experts.

The choice is not learned (Hash Layers, Roller et al. 2021); the router's scores weigh the experts, as in
DeepSeek-V4 and Megatron-LM's `--moe-n-hash-layers`. The table is a function of the layer's number alone, so
that no checkpoint holds it and no seed changes it.
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
    """Return the experts of each id: int64 [R, choices], R >= ids. Every run of E ids loads experts evenly.

    Each run of E ids gets a random order, and the experts another one: the id at place p has the experts at
    places p, p + 1, ..., so a run has each expert `choices` times. In most vocabularies, neighbouring ids are
    about equally frequent, so loads are about even in texts, too.
    """
    runs, members = torch.arange(-(-ids // experts), device=device), torch.arange(experts, device=device)

    def order(of: str) -> Tensor:
        keys = derive(site_key("hashed router", layer, of), runs)
        return hash_uniform(keys.unsqueeze(1), members).argsort(stable=True, dim=1)

    places = (order("ids").unsqueeze(2) + torch.arange(choices, device=device)) % experts
    return order("experts").gather(1, places.flatten(1)).view(-1, choices)


def ids_of(tokens: Tokens, rows: Rows) -> Tensor:
    """The ids of this rank's share of the tokens: int64 [n]."""
    assert rows.ids is not None, "a hashed router needs the ids of tokens"
    column, spread = tokens.number // len(rows.ids), rows.spread
    if spread.cp.size > 1:  # `rows.ids` has this rank's columns only
        columns = spread.own_columns(torch.arange(rows.whole_length, device=column.device))
        column = torch.searchsorted(columns, column)
    return rows.ids[tokens.sequence, column]


class HashedRouter(Router):
    """A router that looks up a token's experts in a table, and weighs them by its scores.

    Args:
        layer, weight, spec, logit_bias: as for `Router`.
        ids: size of the vocabulary.
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
            with torch.inference_mode(False):  # a later training step may use the table
                k, device = self.spec.topk, ranking.device
                self._table = expert_table(self.layer, self.experts, k, self.ids, device)
        return self._table[ids_of(noise.tokens, noise.rows)]
