"""`Layout`: one way to train one small model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, Literal

from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.rules.table import broken_rules
from megazero.config.tree.acceleration import AccelerationConfig
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data import DataConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.optimizer import OptimizerConfig, OptimizerName
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.precision import PrecisionConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.config.tree.training import BatchConfig, TrainingConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.mpu.grid import ProcessGrid
from tests.layouts.variants import VARIANTS

GLOBAL_BATCH = 8
SEQUENCE = 16
VOCABULARY = 61  # a prime, so that it must be padded on every layout

_Settings = Mapping[str, Any]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
Stage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "full", "selective", "parts"]
Dispatcher = Literal["alltoall", "allgather"]

_ENCODER: _Settings = MappingProxyType(
    {
        "family": "bert",
        "num_attention_heads": 8,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
    }
)
_PAIRS: _Settings = MappingProxyType({"family": "t5", "num_attention_heads": 8, "t5_decoder_seq_length": 8})
SHAPES: Mapping[str, _Settings] = MappingProxyType(
    {
        "gpt2": {
            "num_attention_heads": 8,
            "normalization": "LayerNorm",
            "activation": "gelu",
            "position_embedding_type": "learned_absolute",
            "add_bias_linear": True,
        },
        "llama": {
            "num_attention_heads": 16,
            "num_query_groups": 8,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "position_embedding_type": "rope",
            "add_bias_linear": False,
        },
        "deepseek": {
            "num_attention_heads": 8,
            "multi_latent_attention": True,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_head_dim": 6,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 5,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "position_embedding_type": "rope",
            "rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 8,
            "mscale_all_dim": 1.0,
            "add_bias_linear": False,
            "mtp_num_layers": 2,
            "mtp_loss_scaling_factor": 0.3,
        },
        "deepseek-lite": {
            "num_attention_heads": 8,
            "multi_latent_attention": True,
            "kv_lora_rank": 10,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "normalization": "LayerNorm",
            "activation": "gelu",
            "position_embedding_type": "rope",
            "rope_type": "rope",
            "add_bias_linear": True,
        },
        "bert": {**_ENCODER, "activation": "gelu"},
        "bert-original": {
            **_ENCODER,
            "activation": "gelu_exact",
            "apply_residual_connection_post_layernorm": True,
        },
        "t5": {
            **_PAIRS,
            "normalization": "RMSNorm",
            "activation": "geglu",
            "position_embedding_type": "relative",
            "t5_relative_buckets": 8,
            "t5_relative_distance": 12,
            "t5_style": "google",
            "add_bias_linear": False,
        },
        "t5-megatron": {
            **_PAIRS,
            "normalization": "LayerNorm",
            "activation": "relu",
            "position_embedding_type": "learned_absolute",
            "add_bias_linear": True,
        },
    }
)
FP8: Mapping[str, _Settings] = MappingProxyType(
    {
        "": {},
        "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
        "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    }
)
DECODERS, ENCODERS, PAIRS = ("gpt2", "llama"), ("bert", "bert-original"), ("t5", "t5-megatron")
LATENT = ("deepseek", "deepseek-lite")

_EVEN: _Settings = MappingProxyType(
    {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.02,)}
)
_FIRST: _Settings = MappingProxyType({"moe_router_topk": 1, "moe_router_pre_softmax": True})
EXPERTS: Mapping[str, _Settings] = MappingProxyType(
    {
        "": {},
        "top2": {"num_experts": (4,), "moe_z_loss_coeff": 0.01, **_EVEN},
        "first-come": {
            "num_experts": (4,),
            "moe_expert_capacity_factor": 1.0,
            "moe_min_capacity": 1,
            "moe_token_drop_policy": "position",
            **_FIRST,
            **_EVEN,
        },
        "best": {"num_experts": (8,), "moe_router_topk": 3, "moe_expert_capacity_factor": 0.8, **_EVEN},
        "random": {
            "num_experts": (4,),
            "moe_expert_capacity_factor": 1.0,
            "moe_token_drop_policy": "random",
            "moe_pad_expert_input_to_capacity": True,
            "moe_z_loss_coeff": 0.01,
        },
        "biased": {
            "num_experts": (8,),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.02,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 1.5,
        },
        "shared": {
            "num_experts": (4,),
            "moe_ffn_hidden_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
            "moe_router_load_balancing_type": ("global_aux_loss", "seq_aux_loss"),
            "moe_aux_loss_coeff": (0.03, 0.01),
        },
        "residual": {"num_experts": (4,), "mlp_type": "residual", "expert_interval": 2, **_FIRST, **_EVEN},
        "pyramid": {
            "num_experts": (4, 8),
            "moe_layer_freq": (1, 0, 1, 0),
            "moe_ffn_hidden_size": 16,
            **_EVEN,
        },
        "noisy": {
            "num_experts": (4,),
            "moe_input_jitter_eps": 0.1,
            "moe_router_sampling": "second",
            "moe_z_loss_coeff": 0.01,
        },
        "forced": {
            "num_experts": (8,),
            "moe_router_force_load_balancing": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            **_EVEN,
        },
        "hashed": {
            "num_experts": (8,),
            "moe_n_hash_layers": 1,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.02,
            "moe_shared_expert_intermediate_size": 32,
            **_EVEN,
        },
        "assigned": {"num_experts": (4,), "moe_router_load_balancing_type": ("sinkhorn",)},
        "assigned-one": {
            "num_experts": (8,),
            "moe_router_topk": 1,
            "moe_router_load_balancing_type": ("sinkhorn",),
            "moe_z_loss_coeff": 0.01,
        },
        "micro-batch": {
            "num_experts": (4,),
            "moe_expert_capacity_factor": 1.0,
            "moe_capacity_scope": "micro_batch",
            "moe_router_load_balancing_type": ("aux_loss",),
            "moe_aux_loss_coeff": (0.02,),
        },
    }
)
"""Kinds of experts by name, as settings of the model; the empty name has none."""

DRAWN_EXPERTS = tuple(name for name in EXPERTS if name not in ("", "hashed", "forced"))
"""Those that expert layouts are drawn from; routing by ids and by chance have sweeps of their own."""

_TOGETHER = ("micro-batch", "assigned", "assigned-one")
"""Kinds with which a token's result depends on the other sequences of its micro-batch."""

_GROWING = CurriculumConfig(
    seqlen_schedule="fixed_linear",
    seqlen_min_difficulty=8,
    seqlen_total_curriculum_step=3,
    seqlen_difficulty_step=8,
)
_DROPPING: _Settings = MappingProxyType(
    {
        "random_ltd": True,
        "random_ltd_layer_id": (1,),
        "random_ltd_min_value": 8,
        "random_ltd_seq_per_step": 8,
    }
)
METHODS: Mapping[str, _Settings] = MappingProxyType(
    {
        "": {},
        "curriculum": {"curriculum": _GROWING},
        "random-ltd": {"skipping": SkippingConfig(**_DROPPING, random_ltd_require_steps=4)},
        "both": {
            "curriculum": _GROWING,
            "skipping": SkippingConfig(**_DROPPING, random_ltd_require_steps=5),
        },
        "layer-drop": {"skipping": SkippingConfig(progressive_layer_drop=True, pld_theta=0.1, pld_gamma=1.0)},
    }
)
"""Ways to spend less on a step by name, as sections of the configuration; the empty name is none of them.

Each takes effect within five steps.
"""

STORES: Mapping[str, _Settings] = MappingProxyType(
    {
        "": {},
        "cpu": {"optimizer": "cpu", "parameters": "cpu"},
        "nvme": {"optimizer": "nvme", "parameters": "nvme", "block_size": 4096},
        "apart": {"optimizer": "nvme", "gradients": "cpu", "fraction": 0.5},
    }
)
"""Places to keep state in between its uses by name, as settings of the offload; the empty name keeps it on
the device.
"""


ATTENDS: Mapping[str, _Settings] = MappingProxyType(
    {
        "": {},
        "window": {"window_size": (4, 0)},
        "every-other": {"window_size": (3, 0), "window_attn_skip_freq": (2,), "softmax_type": "off-by-one"},
        "sinks": {"window_size": (2, 0), "window_sink_tokens": 2, "softmax_type": "learnable"},
        "blocks": {
            "sparse_attention": "bigbird",
            "sparse_block": 4,
            "sparse_num_random_blocks": 1,
            "sparse_different_layout_per_head": True,
        },
        "alibi": {"position_embedding_type": "alibi"},
    }
)
"""Kinds of attention by name, as settings of the model; the empty name has nothing special."""

WIDTHS: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        "uneven": ((4, 48), (8, 24)),
        "halves": ((4, 32), (0, 40), (8, 0)),
        "empty": ((8, 24), (0, 0), (4, 0)),
    }
)
"""Key/value heads and inner width of each layer by name; 0 for one without attention, or without an MLP."""


@dataclass(frozen=True)
class Layout:
    """One way to train one small model.

    Attributes:
        tp, pp, dp: ranks of each axis.
        schedule: kind of the pipeline schedule.
        virtual: chunks per stage.
        group: micro-batches that pass through a chunk before the next one's turn; 0: as many as stages.
        zero: ZeRO stage.
        sequence_parallel, recompute: as in the configuration; ``parts`` recomputes all parts that there are.
        micro_batch: sequences in a micro-batch.
        samples: sequences in the global batch, so that samples / (dp x micro_batch) micro-batches are
            accumulated.
        keep: whether ZeRO stage 3 keeps gathered parameters for their next use in the step.
        shape, untied, layers, dropout, dtype: properties of the model.
        binary_head: whether an encoder has its second task too.
        packed: whether an encoder's samples share rows.
        optimizer, overlap, bucket_size, hpz, backend: as in the configuration.
        experts: the kind of experts, a name in `EXPERTS`.
        ep, etp: ranks that share the experts of a layer, and each of them; 0 is `tp`.
        dispatcher: the way in which tokens reach their experts.
        method: the way in which steps get cheaper, a name in `METHODS`.
        store: the place of state between its uses, a name in `STORES`.
        compiled: the compiler's backend; by default nothing is compiled.
        fp8: the source of the scales of 8-bit products, a name in `FP8`; by default there are none.
        cp: ranks that share each sequence.
        comm: what their attention sends; ``mixed`` is another thing in each layer.
        sequence: the length of sequences.
        attends: what attention sees and how it weighs it, a name in `ATTENDS`.
        variant: what its layers are like, a name in `VARIANTS`.
        documents: whether a decoder's samples hold several documents, which do not see each other.
        letters: those of a hybrid model's layers, which repeat; empty for a model of transformer layers.
        widths: sizes of its layers, a name in `WIDTHS`, which repeat; empty where all are alike.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: Schedule = "1f1b"
    virtual: int = 1
    zero: Stage = 0
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    micro_batch: int = 1
    keep: bool = False
    shape: str = "gpt2"
    untied: bool = False
    layers: int = 2
    dropout: float = 0.0
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    binary_head: bool = True
    packed: bool = False
    optimizer: OptimizerName = "adam"
    overlap: bool = True
    bucket_size: int = 3000  # gives several buckets, even for this small model
    hpz: int = 1
    backend: Literal["auto", "gloo"] = "auto"
    experts: str = ""
    ep: int = 1
    etp: int = 0
    dispatcher: Dispatcher = "alltoall"
    samples: int = GLOBAL_BATCH
    method: str = ""
    store: str = ""
    compiled: Literal["", "inductor", "aot_eager", "eager"] = ""
    fp8: str = ""
    cp: int = 1
    comm: str = "p2p"
    sequence: int = SEQUENCE
    documents: bool = False
    attends: str = ""
    variant: str = ""
    letters: str = ""
    widths: str = ""
    group: int = 0

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def grid(self) -> ProcessGrid:
        """The grid of the ranks."""
        inner = (self._blocks or (1, 1))[0]
        return ProcessGrid(
            pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, ep=self.ep, etp=self.etp, cp_inner=inner
        )

    @property
    def _types(self) -> tuple[Any, ...]:
        if self.comm != "mixed":
            return (self.comm,)
        return tuple(islice(cycle(("p2p", "a2a", "all_gather")), self.layers))

    @property
    def _blocks(self) -> tuple[int, int] | None:
        """Ranks of a block that exchanges heads, and the number of blocks."""
        return (2, self.cp // 2) if "a2a+p2p" in self.comm and self.cp % 2 == 0 else None

    @property
    def serial(self) -> Layout:
        """The same model in one process with nothing recomputed or accumulated: all samples at once.

        Where results depend on what is in a micro-batch, they have the same micro-batches.
        """
        return Layout(
            micro_batch=self.micro_batch if self.experts in _TOGETHER else self.samples,
            experts=self.experts,
            shape=self.shape,
            untied=self.untied,
            layers=self.layers,
            dropout=self.dropout,
            dtype=self.dtype,
            binary_head=self.binary_head,
            optimizer=self.optimizer,
            samples=self.samples,
            method=self.method,
            fp8=self.fp8,
            sequence=self.sequence,
            documents=self.documents,
            attends=self.attends,
            variant=self.variant,
            letters=self.letters,
            widths=self.widths,
        )

    @property
    def brief(self) -> Layout:
        """The same layout with just enough micro-batches to accumulate and to fill the pipeline twice."""
        replicas = self.dp * self.micro_batch
        enough = 2 if self.pp == 1 else 2 * self.pp
        return replace(self, samples=replicas * min(self.samples // replicas, enough))

    @property
    def name(self) -> str:
        """A one-word name that shows what differs from the defaults."""
        parts: list[str] = [self.optimizer] if self.optimizer != "adam" else []
        parts += [self.shape, f"T{self.tp}P{self.pp}D{self.dp}", f"Z{self.zero}"]
        if self.pp > 1 or self.schedule != "1f1b":
            parts.append(self.schedule + (f"x{self.virtual}" if self.virtual > 1 else ""))
        parts += [f"groups-of-{self.group}"] if self.group else []
        parts += [f"C{self.cp}", self.comm] if self.cp > 1 else []
        parts += [f"s{self.sequence}"] if self.sequence != SEQUENCE else []
        parts += [self.attends] if self.attends else []
        parts += [self.variant] if self.variant else []
        parts += [self.letters] if self.letters else []
        parts += [self.widths] if self.widths else []
        parts += ["documents"] if self.documents else []
        parts += ["SP"] if self.sequence_parallel else []
        parts += ["untied"] if self.untied else []
        parts += [] if self.binary_head else ["one-head"]
        parts += ["packed"] if self.packed else []
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [f"b{self.micro_batch}"] if self.micro_batch > 1 else []
        parts += ["keep"] if self.keep else []
        parts += [f"hpz{self.hpz}"] if self.hpz > 1 else []
        parts += ["dropout"] if self.dropout else []
        parts += [self.backend] if self.backend != "auto" else []
        if self.experts:
            parts += [self.experts, f"E{self.ep}"]
            parts += [f"S{self.etp}"] if self.etp else []
            parts += [self.dispatcher] if self.dispatcher != "alltoall" else []
        parts += [self.method] if self.method else []
        parts += [f"on-{self.store}"] if self.store else []
        parts += [self.compiled] if self.compiled else []
        parts += [f"fp8-{self.fp8}"] if self.fp8 else []
        return "-".join(parts)

    def config(self, steps: int = 5) -> Config:
        """The configuration for `steps` steps."""
        own: _Settings = {"adagrad_eps": 1e-4} if self.optimizer == "adagrad" else {}
        return Config(
            model=ModelConfig(
                num_layers=self.layers,
                hidden_size=32,
                seq_length=self.sequence,
                ffn_hidden_size=48,
                vocab_size=VOCABULARY,
                make_vocab_size_divisible_by=4,
                hidden_dropout=self.dropout,
                attention_dropout=self.dropout,
                untie_embeddings_and_output_weights=self.untied,
                init_method_std=0.1,
                bert_binary_head=self.binary_head,
                **{
                    **SHAPES[self.shape],
                    **EXPERTS[self.experts],
                    **ATTENDS[self.attends],
                    **VARIANTS[self.variant],
                    **self._hybrid,
                    **self._widths,
                },
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                pipeline_schedule=self.schedule,
                num_virtual_stages_per_pipeline_rank=self.virtual if self.virtual > 1 else None,
                microbatch_group_size_per_virtual_pipeline_stage=self.group or None,
                sequence_parallel=self.sequence_parallel,
                distributed_backend=self.backend,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=self.etp or None,
                moe_token_dispatcher_type=self.dispatcher,
                context_parallel_size=self.cp,
                cp_comm_type=self._types,
                hierarchical_context_parallel_sizes=self._blocks,
            ),
            zero=ZeroConfig(
                stage=self.zero,
                bucket_size=self.bucket_size,
                overlap_grad_reduce=self.overlap,
                param_persistence_threshold=40,  # norms stay whole
                prefetch_size=6000,
                max_live_parameters=10**9 if self.keep else 0,
                hpz_partition_size=self.hpz,
            ),
            offload=self._offload(),
            data=DataConfig(
                mock_data=True,
                bert_pack=self.packed,
                reset_attention_mask=self.documents,
                reset_position_ids=self.documents,
            ),
            batch=BatchConfig(micro_batch_size=self.micro_batch, global_batch_size=self.samples),
            # Clipping is active. Epsilon is far above rounding noise: the key bias has no gradient except
            # noise (it cancels in the softmax), which Adam would otherwise amplify to full steps.
            optimizer=OptimizerConfig(
                optimizer=self.optimizer,
                lr=1e-2,
                # Some of the shapes train their embedding and head at a rate of their own.
                decoupled_lr={"llama": 2e-2, "bert": 2e-2, "deepseek": 5e-3}.get(self.shape),
                clip_grad=0.5,
                lr_warmup_iters=2,
                weight_decay=0.1,
                adam_eps=1e-4,
                **own,
            ),
            recompute=self._recompute(),
            acceleration=AccelerationConfig(
                compile=bool(self.compiled), compile_backend=self.compiled or "inductor"
            ),
            precision=PrecisionConfig(dtype=self.dtype, **FP8[self.fp8]),
            training=TrainingConfig(train_iters=steps, seed=7, eval_iters=0),
            **METHODS[self.method],
        )

    def _recompute(self) -> RecomputeConfig:
        if self.recompute != "parts":
            return RecomputeConfig(granularity=self.recompute)
        modules: list[Any] = ["core_attn"] + ["layernorm"] * (self.variant != "olmo")
        modules += ["mla_up_proj"] * (self.shape in LATENT)
        modules += ["moe_act"] * bool(self.experts) + ["shared_experts"] * (self.experts == "shared")
        return RecomputeConfig(granularity="selective", modules=(*modules, "mlp"))

    @property
    def _hybrid(self) -> _Settings:
        if not self.letters:
            return {}
        pattern = (self.letters * self.layers)[: self.layers]
        sizes = {"mamba_state_dim": 5, "mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_num_heads": 8}
        return {"hybrid_layer_pattern": pattern, **(sizes if "M" in pattern else {})}

    @property
    def _widths(self) -> _Settings:
        if not self.widths:
            return {}
        shapes = tuple(islice(cycle(WIDTHS[self.widths]), self.layers))
        text = text_of(tuple(LayerShape(*shape) for shape in shapes))
        return {"heterogeneous_layers_config_encoded_json": text, "num_attention_heads": 8, "kv_channels": 4}

    def _offload(self) -> OffloadConfig:
        settings: dict[str, Any] = {"path": tempfile.gettempdir(), **STORES[self.store]}
        if self.zero < 3:
            settings.pop("parameters", None)
        return OffloadConfig(**settings)

    def broken_rules(self) -> list[str]:
        """The names of the rules that the layout breaks."""
        return broken_rules(self.config(), self.world_size)
