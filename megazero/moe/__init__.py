"""moe: mixture of experts (Shazeer et al. 2017; GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021).

`mlp` puts the parts together, in the place of a layer's MLP: `tokens` says which tokens a rank routes,
`router` chooses experts, `losses` keeps their loads even, `capacity` drops what an expert has no room for,
`dispatch` brings tokens to the ranks of their experts and back, and `experts` computes. What a token gets
does not depend on the layout: every decision is about one sequence.

`layer` and `utils` are doors to DeepSpeed's layer for models of any kind (`megazero.deepspeed.moe`).
"""

from megazero.moe import layer, utils

__all__ = ["layer", "utils"]
