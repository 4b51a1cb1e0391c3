"""`init_inference`: slices, converts and wraps a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.legacy.inference.checkpoint import checkpoint_files, give_memory, load_weights
from megazero.deepspeed.legacy.inference.config import DeepSpeedInferenceConfig, read_config
from megazero.deepspeed.legacy.inference.engine import InferenceEngine
from megazero.deepspeed.legacy.inference.fused import inject
from megazero.deepspeed.tensor_parallel.cutter import Cutter, synchronise
from megazero.deepspeed.tensor_parallel.layers import SlicedLinear, is_linear
from megazero.deepspeed.tensor_parallel.policy import SlicingPolicy, slice_model
from megazero.deepspeed.tensor_parallel.training import TensorParallelRequest
from megazero.errors import ConfigError
from megazero.inference.generate import generate as continue_prompts
from megazero.inference.sampling import Sampling
from megazero.models.language_model import LanguageModel
from megazero.mpu.context import ParallelContext, solo_context
from megazero.mpu.launch import Launch, choose_device


def init_inference(model: nn.Module, config: object = None, **kwargs: object) -> InferenceEngine:
    """Prepare a model for inference: sliced over ranks, on its device and in its dtype.

    Adjacent ranks share one copy of the model; a larger world holds several copies.

    Args:
        model: a Hugging Face model, one of megazero's, or any module.
        config: the configuration, or the path of a JSON; see `DeepSpeedInferenceConfig`.
        kwargs: keys of the configuration.

    Raises:
        ConfigError: the configuration is wrong, or the model cannot be sliced.
        CheckpointError: `checkpoint` lacks weights of the model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__}")
    read = read_config(config, kwargs)
    own = own_model(model)
    context = _context(read)
    if own is None:
        slice_model(Cutter(model, context.tp, trained=False), _policy(read))
    elif context.tp.size > 1:
        raise ConfigError(
            "`tensor_parallel.tp_size` must be 1 for a model of megazero's, which is sliced when it is "
            f"built, but is {context.tp.size}; leave it out"
        )
    device = torch.device("cpu") if read.keep_module_on_host else context.device
    _fill(model, read, context, device)
    dtype = _convert(model, read) if own is None else own.check(read)
    injected = inject(model) if read.replace_with_kernel_inject and own is None else {}
    if own is None and read.dtype == torch.int8 and read.quant.enabled and read.quant.weight.enabled:
        quantize(model, dtype, read.quant.weight.q_groups)
    model.to(device).eval()
    synchronise(context.tp, context.device)
    generate: Callable[..., object] | None = own.generate if own else getattr(model, "generate", None)
    sliced = context if context.tp.size > 1 else None
    return InferenceEngine(model, read, sliced, dict(injected), generate)


def _context(config: DeepSpeedInferenceConfig) -> ParallelContext:
    """Return the ranks that the model is sliced over; a single rank does not join torch's world."""
    section = config.tensor_parallel
    size = section.tp_size if section.enabled else 1
    if section.tp_group is not None:
        size = section.tp_group.size()
    request = TensorParallelRequest(size, group=section.tp_group)
    if section.mpu is not None:
        return find_context(section.mpu)
    if size == 1:
        return solo_context(choose_device("auto", Launch.from_environment().local_rank))
    context = find_context(request.layout(None))
    request.check_group(context)
    return context


def _policy(config: DeepSpeedInferenceConfig) -> SlicingPolicy:
    if config.injection_policy_tuple is not None:
        raise ConfigError(
            "`injection_policy_tuple` must be left out, but is given; give `injection_policy` with the class "
            "of the layers"
        )
    return SlicingPolicy(injection=config.injection_policy)


def _fill(
    model: nn.Module, config: DeepSpeedInferenceConfig, context: ParallelContext, device: torch.device
) -> None:
    """Load the checkpoint, if there is one."""
    checkpoint = config.checkpoint or config.checkpoint_config.checkpoint_dir
    if checkpoint is None:
        if any(param.is_meta for param in model.parameters()):
            raise ConfigError(
                "`checkpoint` must be given for a model on the meta device, but is not; give the folder of "
                "its weights"
            )
        return
    base_dir = config.base_dir or config.checkpoint_config.base_dir or ""
    files = checkpoint_files(checkpoint, base_dir)
    give_memory(model, device)
    load_weights(model, files, context.tp)


def _convert(model: nn.Module, config: DeepSpeedInferenceConfig) -> torch.dtype:
    """Convert parameters and persistent buffers; other buffers (rotary tables) keep their dtype."""
    dtype = config.dtype
    if dtype == torch.int8:  # only weights become int8: products stay in the model's own dtype
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    saved = model.state_dict().keys()
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name in saved:
            buffer.data = buffer.data.to(dtype)
    return dtype


class OwnModel:
    """Generates with one of megazero's models, by the arguments of Hugging Face's `generate`."""

    def __init__(self, model: LanguageModel):
        self.model = model

    def check(self, config: DeepSpeedInferenceConfig) -> torch.dtype:
        """Return the dtype of the weights, which is never converted.

        Raises:
            ConfigError: the configuration asks for another dtype.
        """
        dtype = next(self.model.parameters()).dtype
        if "dtype" in config.model_fields_set and config.dtype != dtype:
            raise ConfigError(
                f"`dtype` must be that of the model ({dtype}), but is {config.dtype}; leave it out, or build "
                "the model in that dtype"
            )
        return dtype

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Return prompts [b, s] with their continuations, [b, s + new], padded with `eos_token_id` (or 0).

        Args:
            input_ids: the prompts; lists may differ in length.
            max_new_tokens: the most tokens to add.
            do_sample: whether to sample; otherwise the most probable token is taken.
            temperature, top_k, top_p, seed: see `Sampling`.
            eos_token_id: the token that ends a sequence.
        """
        prompts = input_ids.tolist() if isinstance(input_ids, Tensor) else [list(p) for p in input_ids]
        sampling = Sampling(greedy=True)
        if do_sample:
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        added = continue_prompts(
            self.model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, eod=eos_token_id
        )
        rows = [prompt + more for prompt, more in zip(prompts, added, strict=True)]
        width, end = max(map(len, rows)), eos_token_id or 0
        device = next(self.model.parameters()).device
        return torch.tensor([row + [end] * (width - len(row)) for row in rows], device=device)


def own_model(model: nn.Module) -> OwnModel | None:
    """Wrap a model of megazero's; return None for any other module.

    Raises:
        ConfigError: the model is sequence-parallel.
    """
    if not isinstance(model, LanguageModel):
        return None
    if model.placement.sequence_parallel:
        raise ConfigError(
            "`sequence_parallel` must be off to generate, but is on; pass "
            "`model.without_sequence_parallelism()`, which has the same weights"
        )
    return OwnModel(model)


class LayerPolicy:
    """Stands for DeepSpeed's policies of model families; here a table of families has these rules."""


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing: `initialize` always slices for training, and `init_inference` for inference."""


class Int8Rows(nn.Module):
    """Stores a weight [n, m] as int8 with a scale for each group of a row: its largest magnitude / 127.

    It halves the memory of fp16 weights; each product first dequantizes the weight.

    Args:
        dtype: the dtype of products.
        groups: the number of groups in a row; 1 is used if it does not divide the row.
    """

    def __init__(self, dtype: torch.dtype, groups: int):
        super().__init__()
        self.dtype, self.groups = dtype, groups

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize a weight to int8 [n, m] and scales [n, groups, 1]."""
        groups = self.groups if weight.shape[1] % self.groups == 0 else 1
        parts = weight.float().view(weight.shape[0], groups, -1)
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return (parts / scale).round().to(torch.int8).view_as(weight), scale

    def forward(self, rounded: Tensor, scale: Tensor) -> Tensor:
        """Dequantize the weight."""
        parts = rounded.view(*scale.shape[:2], -1).to(scale.dtype)
        return (parts * scale).view_as(rounded).to(self.dtype)


def quantize(model: nn.Module, dtype: torch.dtype, groups: int) -> int:
    """Quantize the weights of all linear layers except the output layer; return their number."""
    model.requires_grad_(False)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = [
        module
        for module in model.modules()
        if (is_linear(module) or isinstance(module, SlicedLinear)) and module is not head
    ]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Int8Rows(dtype, groups), unsafe=True)
    return len(layers)
