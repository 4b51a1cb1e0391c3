"""Roles of settings: a setting's declaration gives them, and `config/fields.py` lists settings by role."""

from __future__ import annotations

import enum


class Role(enum.Flag):
    """The purpose of a setting. Each has one of the first five, by which a resume treats another value."""

    NONE = 0
    MODEL = enum.auto()  # the model is another one, and its checkpoint is refused
    FREE = enum.auto()  # of the section about the model; its checkpoint may have another
    SCHEDULE = enum.auto()  # part of a schedule, which must be the checkpoint's
    TOLD = enum.auto()  # the run goes on, and reports the change
    QUIET = enum.auto()  # the run goes on; what it trains is the same

    PLACEMENT = enum.auto()  # determines with others which layers have which experts, window or mixer
    ROTARY = enum.auto()  # of rotary positions, which `--extend-context` may change
    HEAD = enum.auto()  # of the head that pretraining has and a classifier has not
    EXPERTS = enum.auto()  # without meaning in a model without experts
    VARIANT = enum.auto()  # an architecture of Hugging Face has the default unless its table names it
    NOT_OF_MAMBA = enum.auto()  # without meaning in a model whose layers are all Mamba-2

    MEGATRON = enum.auto()  # of the same name and meaning in Megatron's arguments
    MEGATRON_CORE = enum.auto()  # of the models that only Megatron-Core makes
    HYBRIDS_IGNORE = enum.auto()  # of what Megatron-Core ignores in some layers of a hybrid
    LATENT = enum.auto()  # a width of latent attention, named as in Megatron
    MAMBA = enum.auto()  # a size of Mamba-2 layers, named as in Megatron
    YARN = enum.auto()  # of YaRN's scaling, named as in Megatron

    FILE = enum.auto()  # names files, whose content is compared instead
    OUTPUT = enum.auto()  # names what a run writes outside the folder of `--save`, on a local path
    SECRET = enum.auto()  # is shown and saved in part alone (`secret.py`)
    LOCAL = enum.auto()  # of one machine or rank; others may have another
    SOURCE = enum.auto()  # names what pretraining reads; one is given, or none
    LENGTH = enum.auto()  # grows with the length of the training
    RATE = enum.auto()  # an amount per step; shrinks as the training grows


RESUME = Role.MODEL | Role.FREE | Role.SCHEDULE | Role.TOLD | Role.QUIET
"""The roles of resume, of which each setting has one."""
