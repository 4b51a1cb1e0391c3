"""A rank's use of memory: the bytes held between steps, and those that a step takes beyond them."""

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
"""The kinds of memory: those of a store, buffers of gathers and reductions, and activations."""


class MemoryMeter:
    """Measures the memory of one rank by place and kind.

    Weights, masters, moments and gradient sums are what the store holds, padding included. Buffers are the
    most bytes that gathered weights and transient gradients took at a time, each counted apart, and those
    through which state moves to and from a disk, and between the device and the host. Activations are
    measured: the peak of a step less all of the device's other kinds, so that these add up to the peak.
    Temporaries of operators and of the update are thus among them; where buffers and activations peak at
    different moments, activations come out smaller. The peak is that of torch's allocator on a CUDA device;
    elsewhere, the meta device included, the outputs of operators on this thread are counted.

    On the host, activations are the inputs of recomputed units that are kept there.

    Args:
        store: holds the state.
        sharding: gathers and reduces.
        device: of the weights.
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
        self._peak = 0  # bytes beyond what was there before, without those of gathered weights

    @classmethod
    def of(cls, store: Store, executor: Executor[Any]) -> MemoryMeter:
        """A meter for a store, and for what the executor of its rank gathers, reduces and computes."""
        return cls(store, executor.sharding, executor.device, executor.chunks.values())

    @contextmanager
    def over_a_step(self) -> Iterator[None]:
        """Measure the memory that the block takes."""
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
        """Bytes by place (``device``, ``cpu``, ``nvme``) and by `KINDS`, of which only those above zero."""
        gathered, transient = self.sharding.most_buffer_bytes
        held: Sizes = self.store.sizes()
        kept = held.get("device", {})
        transient += kept.get("buffers", 0)  # both are made while a step runs
        device = {
            **kept,
            "buffers": gathered + transient,
            "activations": max(0, self._peak - transient),
        }
        places = {"device": device, **{place: kinds for place, kinds in held.items() if place != "device"}}
        shelved = sum(shelf.nbytes for shelf in self.shelves)
        places["cpu"] = {**places.get("cpu", {}), "activations": shelved}
        return {
            place: {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}
            for place, kinds in places.items()
            if place in held or place == "device" or any(kinds.values())
        }


class PeakOfOutputs(TorchDispatchMode):
    """Counts the bytes of the storages that operators make on this thread, and the most at a time.

    Attributes:
        most: the most bytes so far.
        alive: the bytes now.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.most = self.alive = 0
        self._ends: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.finalize[..., object]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds, and nothing compiles

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = None
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage in self._ends:
                continue
            if given is None:
                inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
                given = {x.untyped_storage()._cdata for x in inputs if x.layout is torch.strided}
            if storage._cdata not in given:
                size = storage.nbytes()
                self._ends[storage] = weakref.finalize(storage, self.freed, size, self.made(size))
        return out

    def forget(self, storage: torch.UntypedStorage, dropped: Callable[[], None] | None = None) -> int:
        """Count a storage no longer; returns its bytes, or 0 if it was not counted.

        Args:
            storage: the storage.
            dropped: called when it is freed.
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
        """An operator has made a storage; what this returns is given to `freed` with its size."""
        self.alive += size
        self.most = max(self.most, self.alive)
        return None

    def freed(self, size: int, made: object) -> None:
        """A storage is gone."""
        self.alive -= size
