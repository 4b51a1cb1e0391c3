"""Self-attention, with its heads sliced over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.config.tree.model import ModelConfig
from megazero.layers.cores import core_of
from megazero.layers.inputs import Attends, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, residual_std
from megazero.layers.patterns import OwnSlopes, pattern_of
from megazero.layers.placement import Placement
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.rotary import apply_rotary


class SelfAttention(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added); both hold s/tp rows under sequence parallelism.

    If the inputs say which rows are wanted, the result is [r, b, h] and holds only these.

    Queries, keys and values come from one weight of logical shape [groups, queries per group + 2, d, h]:
    a group's query heads, then its key, then its value, so that slicing over groups keeps each group whole.

    Args:
        causal: whether a position attends only to itself and earlier ones.
        recompute: whether to drop the attention core's activations and compute them again in backward
            (selective recompute, Korthikanti et al. 2022).
    """

    def __init__(
        self, layer: int, config: ModelConfig, placement: Placement, *, causal: bool, recompute: bool = False
    ):
        super().__init__()
        pattern = pattern_of(config, layer, placement.tp, causal)
        self.attends = Attends(layer, causal, config.attention_dropout, pattern)
        self.core = core_of(placement, layer)
        self.slopes = OwnSlopes.of(config, placement)
        self.softmax_type = config.softmax_type
        self.softmax_offset = self._offset_of(layer, config, placement)
        self.recompute = recompute
        self.queries_per_group = config.num_attention_heads // config.kv_heads
        self.qkv = ColumnParallelLinear(
            f"layers.{layer}.attention.qkv",
            config.hidden_size,
            (config.kv_heads, self.queries_per_group + 2, config.head_dim),
            placement,
            bias=config.qkv_bias,
            std=config.init_method_std,
            matrices=Matrices(parts=(self.queries_per_group, 1, 1), dim=1),
        )
        self.out = RowParallelLinear(
            f"layers.{layer}.attention.out",
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            placement,
            bias=config.add_bias_linear,
            std=residual_std(config),
        )

    def _offset_of(self, layer: int, config: ModelConfig, placement: Placement) -> nn.Parameter | None:
        if config.softmax_type != "learnable":
            return None
        spec = ParamSpec(
            f"layers.{layer}.attention.softmax_offset",
            (config.num_attention_heads,),
            InitialValues("normal", config.init_method_std),
            (Cut(0, "tp"),),
            weight_decay=False,
        )
        return placement.parameter(spec)

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        qkv = self.qkv(x, inputs.deferred)
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, *self.qkv.local_shape)  # [s, b, g/tp, q + 2, d]
        # One split, because its backward is one concatenation, while each slice would add a tensor of zeros.
        query, key, value = qkv.split((self.queries_per_group, 1, 1), dim=3)
        query = query.reshape(s, b, -1, qkv.shape[-1])  # [s, b, n/tp, d]
        key, value = key.squeeze(3), value.squeeze(3)  # [s, b, g/tp, d]
        if self.recompute:
            context = checkpoint(
                self._attend, query, key, value, inputs, use_reentrant=False, preserve_rng_state=False
            )
        else:
            context = self._attend(query, key, value, inputs)
        result: tuple[Tensor, Tensor | None] = self.out(context, inputs.deferred)
        return result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs) -> Tensor:
        rotary = inputs.rows.rotary
        if rotary is not None:
            query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        core = self.core if inputs.core is None else inputs.core
        offset: Tensor | None = self.softmax_offset
        if self.softmax_type == "off-by-one":
            offset = query.new_zeros(query.shape[2])
        bias = None if self.slopes is None else self.slopes.on(query.device)
        return core(query, key, value, inputs, self.attends, bias, offset)
