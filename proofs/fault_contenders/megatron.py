"""megatron-core's GPTModel, DistributedDataParallel, distributed optimizer and rerun state machine.

The loop is made of megatron-core's public parts, as Megatron-LM's scripts put them together, with those
scripts' defaults: NaN and inf are looked for in each rank's loss and gradients
(`check_for_nan_in_loss_and_grad` is on), a step in which one is found is computed again (`rerun_mode` is
`validate_results`), and spikes of the loss, large gradients, differing weights and slow ranks are not looked
for. The library by itself, without those scripts, does not rerun: its default is `disabled`, which is the
second contender here. The distributed optimizer is on, as in ZeRO 1, which is a choice in Megatron-LM too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from proofs.fault_contenders.faults import TIMEOUT, Hook, Trainer, hooked

VOCABULARY, SEQUENCE, SAMPLES = 64, 16, 8


class _CudaIsTheCpu(TorchFunctionMode):
    """Lets code that was written for CUDA devices run without one; changes no arithmetic.

    megatron-core 0.16.1 makes its flags, norms and causal masks with `device="cuda"`, and its distributed
    optimizer and its clipping accept a tensor only if `type()` says that it is a CUDA tensor.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def _without_cuda() -> None:
    """For the rest of this process: the buffers' device, and the random states that a rerun restores."""
    _CudaIsTheCpu().__enter__()
    for name, instead in (
        ("current_device", lambda: torch.device("cpu")),
        ("get_rng_state", lambda *_, **__: torch.get_rng_state()),
        ("set_rng_state", lambda *_, **__: None),
        ("synchronize", lambda *_, **__: None),
    ):
        mock.patch.object(torch.cuda, name, instead).start()


class WithMegatron(Trainer):
    """A GPT of two layers that learns sequences of tokens with a fixed distance."""

    def __init__(self, lr: float, seed: int, rerun_mode: str = "validate_results"):
        _without_cuda()
        from megatron.core import parallel_state, rerun_state_machine, tensor_parallel
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.settings = {"lr": lr, "seed": seed, "rerun_mode": rerun_mode}
        # Its groups have a time limit of their own.
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=TIMEOUT / 60)
        # There is no dropout, so the tracker of CUDA's random states may be the one that tracks nothing.
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
        mode = rerun_state_machine.RerunMode(rerun_mode)
        rerun_state_machine.initialize_rerun_state_machine(mode=mode)
        self.machine = rerun_state_machine.get_rerun_state_machine()
        self.model = self._model()
        self.optimizer = self._optimizer(lr)
        self.forward_backward = get_forward_backward_func()
        self.data = rerun_state_machine.RerunDataIterator(iter(self._batches, None))
        self.now: tuple[Tensor, Tensor] | None = None
        self.hook: Hook | None = None

    def _model(self) -> nn.Module:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            finalize_model_grads_func=finalize_model_grads,
        )
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE
        )
        options = DistributedDataParallelConfig(use_distributed_optimizer=True, check_for_nan_in_grad=True)
        return DistributedDataParallel(config, options, model)

    def _optimizer(self, lr: float):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(lr=lr, use_distributed_optimizer=True)
        return get_megatron_optimizer(config, [self.model])

    def batch(self, draw: torch.Generator, noise: bool) -> tuple[Tensor, Tensor]:
        shape = (SAMPLES, SEQUENCE + 1) if noise else (SAMPLES, 1)
        tokens = torch.randint(VOCABULARY, shape, generator=draw)
        if not noise:
            tokens = (tokens + 5 * torch.arange(SEQUENCE + 1)) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:]

    def _batches(self) -> tuple[Tensor, Tensor]:
        return self.now

    def _forward(self, data, model: nn.Module):
        """What its schedules want: the losses of the tokens, and a function that makes one loss of them."""
        tokens, labels = next(data)
        positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
        return hooked(model(tokens, positions, None, labels=labels), self.hook), self._loss

    def _loss(self, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = losses.sum()
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "inf")):
            self.machine.validate_result(loss, reject, f"{what} in this rank's loss", fatal=True)
        return loss, torch.tensor(losses.numel(), dtype=torch.int), loss.detach() / losses.numel()

    def step(self, x: Tensor, y: Tensor, hook: Hook | None) -> float:
        self.now, self.hook = (x, y), hook
        while self.machine.should_run_forward_backward(self.data):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self.forward_backward(
                forward_step_func=self._forward,
                data_iterator=self.data,
                model=[self.model],
                num_microbatches=1,
                seq_length=SEQUENCE,
                micro_batch_size=SAMPLES,
            )
        checkpoint, ends, status = self.machine.should_checkpoint_and_exit()
        if checkpoint:
            self.save()
        if ends:
            sys.exit(status)
        self.optimizer.step()
        return float(losses[0])

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def moment(self) -> Tensor:
        return next(iter(self.optimizer.optimizer.state.values()))["exp_avg"]

    def save(self) -> None:
        """As Megatron-LM does: sharded, with its settings and the state of the rerun."""
        from megatron.core import dist_checkpointing

        folder = Path(self.folder, "checkpoint")
        folder.mkdir(exist_ok=True)
        metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
        model = self.model.sharded_state_dict(metadata=metadata)
        state = {
            "args": self.settings,
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, metadata=metadata),
            "rerun_state_machine": self.machine.state_dict(self.data, "torch_dist"),
        }
        dist_checkpointing.save(state, str(folder))


def without_rerun(lr: float, seed: int) -> WithMegatron:
    """As the library does where nobody chose a mode."""
    return WithMegatron(lr, seed, rerun_mode="disabled")
