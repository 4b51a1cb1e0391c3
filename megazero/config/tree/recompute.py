"""The section `recompute`: activations that backward computes again."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option

_NO_LAYER = (here.granularity == "full").because("no whole layer is recomputed")

Module = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]
"""A part of a layer that backward may compute again by itself."""


class RecomputeConfig(Section):
    """Activation recompute"""

    granularity: Literal["none", "selective", "full"] = option(
        "none",
        flag="--recompute-granularity",
        switches={
            "--recompute-activations": "selective",
            "--checkpoint-activations": "full",
            "--deepspeed-activation-checkpointing": "full",
        },
        yielding=("--recompute-activations",),
    )
    """what backward computes again: nothing, the attention core, or whole layers"""
    modules: tuple[Module, ...] = option(
        ("core_attn",),
        flag="--recompute-modules",
        switches={"--moe-layer-recompute": ("core_attn", "moe")},
        implies={"--moe-layer-recompute": ("granularity", "selective")},
        refused={"mhc": "belongs to hyper-connections, which are not built"},
        needs=(
            here.granularity == "selective",
            config.acceleration.compile.is_off.because("a compiled layer saves what its compiler chooses"),
            config.acceleration.cuda_graph.is_off.because("a graph keeps the memory of its layer anyway"),
        ),
    )
    """selective: the parts of a layer that backward computes again: the core of attention, the norms before
    attention and MLP, dense MLPs, routers with all experts, activations of experts, shared experts,
    projections up from latent vectors"""
    method: Literal["uniform", "block", "every"] = option(
        "uniform",
        flag="--recompute-method",
        aliases=("--activations-checkpoint-method",),
        # Megatron 2 recomputed whole layers wherever it was told how.
        implies={"--activations-checkpoint-method": ("granularity", "full")},
        idle_without=_NO_LAYER,
    )
    """uniform: every unit of layers; block: only the first layers of each model chunk; every: one layer of
    each unit"""
    num_layers: NonNegativeInt = option(
        1,
        flag="--recompute-num-layers",
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
        idle_without=_NO_LAYER,
    )
    """uniform, every: layers per unit; block: layers recomputed per model chunk, of which 0 are none"""
    partition_activations: bool = option(
        False,
        aliases=("--distribute-saved-activations", "--distribute-checkpointed-activations"),
        needs=(
            here.granularity == "full",
            config.parallel.sequence_parallel.is_off.because(
                "there each rank keeps only its own part anyway"
            ),
        ),
    )
    """split what a recomputed unit starts from over the tensor-parallel ranks: each keeps only its part"""
    offload: bool = option(False, flag="--checkpoint-in-cpu", needs=here.granularity == "full")
    """keep what a recomputed unit starts from in host memory"""
    logits: bool = option(
        False,
        flag="--recompute-logits",
        needs=(
            (config.model.family == "gpt").because("other heads are small, or need their logits whole"),
            (config.finetune.task.is_none | (config.finetune.task == "chat")).because(
                "other tasks have small heads, or need them whole"
            ),
            config.distillation.kd.is_off.because("whole logits are compared there"),
        ),
    )
    """compute the projection to the vocabulary and the loss by blocks of the vocabulary, and again in
    backward, so that the logits are never whole"""
    logits_tiles: NonNegativeInt = option(
        0, flag="--recompute-logits-tiles", synonyms={"auto": 0}, needs=here.logits
    )
    """tiles of positions in which that loss is computed, one after another; 0 or auto: so many that one's
    logits would take 1 GiB at most in float32"""
    mlp_tiles: NonNegativeInt = option(
        1,
        synonyms={"auto": 0},
        needs=(
            config.acceleration.compile.is_off.because(
                "a compiled layer is one region, with no loop over tiles in its backward"
            ),
            config.acceleration.cuda_graph.is_off.because("a graph keeps buffers of whole sequences"),
        ),
    )
    """tiles of positions in which each MLP is computed, one after another, and again in backward; 0 or auto:
    of about as many positions as the hidden size"""

    def again(self, module: Module) -> bool:
        """Whether backward computes this part of a layer again by itself."""
        return self.granularity == "selective" and module in self.modules
