"""What settings are for: each says so where it is declared, and `config/fields.py` lists them by it."""

from __future__ import annotations

import enum


class Role(enum.Flag):
    """What a setting is for. Each has one of the first five: what a resume makes of another value."""

    NONE = 0
    MODEL = enum.auto()
    """The model is another one, and its checkpoint is refused."""
    FREE = enum.auto()
    """Of the section about the model; its checkpoint may have another."""
    SCHEDULE = enum.auto()
    """A schedule is made of it, and what is made is compared (`train/resume/scheduled.py`)."""
    TOLD = enum.auto()
    """The run goes on, and says so."""
    QUIET = enum.auto()
    """The run goes on; what it trains is the same."""

    PLACEMENT = enum.auto()
    """Says with others which layers have which experts, window or mixer; what they say is compared."""
    ROTARY = enum.auto()
    """How far and how fast channels turn, which `--extend-context` may change."""
    HEAD = enum.auto()
    """Of the head that pretraining has and a classifier has not."""
    EXPERTS = enum.auto()
    """Says nothing of a model without experts."""
    VARIANT = enum.auto()
    """Of a variant of layers: an architecture of Hugging Face whose tables do not name it has the default."""
    NOT_OF_MAMBA = enum.auto()
    """Says nothing of a model whose layers are all Mamba-2."""

    MEGATRON = enum.auto()
    """Megatron's arguments have it under the same name, with the same meaning, in any model with it."""
    MEGATRON_CORE = enum.auto()
    """Of the models that only Megatron-Core makes."""
    HYBRIDS_IGNORE = enum.auto()
    """Megatron-Core takes it beside a hybrid's layers, and ignores it in some."""
    LATENT = enum.auto()
    """A width of latent attention, named as in Megatron."""
    MAMBA = enum.auto()
    """A size of Mamba-2 layers, named as in Megatron."""
    YARN = enum.auto()
    """Of YaRN's scaling, named as in Megatron."""

    FILE = enum.auto()
    """Names files, whose content is compared instead."""
    LOCAL = enum.auto()
    """Of one machine or rank; others may have another."""
    SOURCE = enum.auto()
    """Names what pretraining reads; one is given, or none."""
    LENGTH = enum.auto()
    """Grows with the length of the training that it is part of."""
    RATE = enum.auto()
    """What happens in a step; shrinks as the training grows."""


RESUME = Role.MODEL | Role.FREE | Role.SCHEDULE | Role.TOLD | Role.QUIET
"""The roles of which each setting has one."""
