"""Names of `deepspeed.module_inject` that scripts pass on without looking into them."""

from __future__ import annotations


class LayerPolicy:
    """A policy of DeepSpeed's for a family; here the family's row of the table decides instead."""


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: `initialize` slices for training and `init_inference` for inference, without being told."""
