"""A rank's memory: the bytes held between steps, and the further bytes that a step takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.layers.recompute import InputKeeping
from megazero.pipeline.chunk import Sharding
from megazero.pipeline.executor import Executor
from megazero.zero.store.store import HELD, Sizes, Store

KINDS = (*HELD, "activations")
"""The kinds of memory: those of a store, with buffers of gathers and reductions, and activations."""


class MemoryMeter:
    """Measures the memory of one rank by place and kind.

    Weights, masters, moments and gradient sums are the store's, with padding. Buffers are the peak of
    gathered weights, plus the peak of transient gradients, plus the buffers by which state moves between
    device, host and disk. Activations are the peak of a step minus the device's other kinds, so that all
    kinds add up to the peak. They include temporaries of operators and of the update, and are too small if
    buffers and activations peak at different moments. On CUDA the peak is that of torch's allocator; on other
    devices, including meta, it counts the outputs of operators on this thread.

    On the host, activations are the inputs of recomputed units that are kept there.

    Args:
        store: the optimizer's store of state.
        sharding: gathers weights and reduces gradients.
        device: the device of the weights.
        chunks: the rank's parts of the model, whose recomputed units may keep inputs on the host.
    """

    def __init__(self, store: Store, sharding: Sharding, device: torch.device, chunks: Iterable[object] = ()):
        modules = (m for chunk in chunks if isinstance(chunk, nn.Module) for m in chunk.modules())
        keepings = (
            keeping for m in modules if isinstance(keeping := getattr(m, "keeping", None), InputKeeping)
        )
        self.shelves = [keeping.shelf for keeping in keepings if keeping.shelf is not None]
        self.store = store
        self.sharding = sharding
        self.device = device
        self._peak = 0  # bytes of a step above its beginning, without gathered weights

    @classmethod
    def of(cls, store: Store, executor: Executor[Any]) -> MemoryMeter:
        """Make the meter of a rank from its store and its executor."""
        return cls(store, executor.sharding, executor.device, executor.chunks.values())

    @contextmanager
    def over_a_step(self) -> Iterator[None]:
        """Measure the peak of memory within the block."""
        if self.device.type != "cuda":
            with PeakOfOutputs() as outputs:
                yield
            self._peak = outputs.most
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        gathered, _ = self.sharding.most_buffer_bytes
        self._peak = torch.cuda.max_memory_allocated(self.device) - before - gathered

    def sizes(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes by place (``device``, ``cpu``, ``nvme``) and by those of `KINDS` that are above zero."""
        gathered, transient = self.sharding.most_buffer_bytes
        stored: Sizes = self.store.sizes()
        on_device = stored.get("device", {})
        transient += on_device.get("buffers", 0)  # both are made while a step runs
        device = {
            **on_device,
            "buffers": gathered + transient,
            "activations": max(0, self._peak - transient),
        }
        places = {"device": device, **{place: kinds for place, kinds in stored.items() if place != "device"}}
        kept_inputs = sum(shelf.nbytes for shelf in self.shelves)
        places["cpu"] = {**places.get("cpu", {}), "activations": kept_inputs}
        return {
            place: {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}
            for place, kinds in places.items()
            if place in stored or place == "device" or any(kinds.values())
        }


class PeakOfOutputs(TorchDispatchMode):
    """Counts the bytes of the storages that operators on this thread make, until they are freed.

    Attributes:
        most: the peak of `alive`.
        alive: the bytes that exist now.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.most = self.alive = 0
        self._ends: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.finalize[..., object]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler, which takes seconds and is not used

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        of_inputs = None
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage in self._ends:
                continue
            if of_inputs is None:
                inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
                of_inputs = {x.untyped_storage()._cdata for x in inputs if x.layout is torch.strided}
            if storage._cdata not in of_inputs:
                size = storage.nbytes()
                self._ends[storage] = weakref.finalize(storage, self.freed, size, self.made(size))
        return out

    def forget(self, storage: torch.UntypedStorage, dropped: Callable[[], None] | None = None) -> int:
        """Stop counting a storage; returns its bytes, or 0 if it was not counted.

        Args:
            storage: the storage.
            dropped: called when the storage is freed.
        """
        end = self._ends.get(storage)
        if dropped is not None:
            weakref.finalize(storage, dropped)
        if end is None or not end.alive:
            return 0
        end.detach()
        size: int = storage.nbytes()
        self.alive -= size
        return size

    def made(self, size: int) -> object:
        """Count a storage that an operator has made; `freed` gets what this returns."""
        self.alive += size
        self.most = max(self.most, self.alive)
        return None

    def freed(self, size: int, made: object) -> None:
        """Count that a storage is gone; `made` is what the call of `made` returned."""
        self.alive -= size
