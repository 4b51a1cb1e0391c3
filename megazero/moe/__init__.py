"""moe: mixture of experts (Shazeer et al. 2017; GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021).

`mlp` replaces a layer's MLP and puts the parts together: `tokens` says which tokens a rank routes, `router`
chooses experts, `losses` balances their loads, `capacity` drops choices, `dispatch` sends tokens to the ranks
of their experts and back, and `experts` computes. Every decision is made per sequence, so a token's result
does not depend on the layout.

`layer` and `utils` are doors to DeepSpeed's layer for models of any kind (`megazero.deepspeed.moe`).
"""

from megazero.moe import layer, utils

__all__ = ["layer", "utils"]
