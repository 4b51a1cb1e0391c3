"""labelled: samples with labels, from files as published to the arrays of a training step.

`files` reads TSV, JSONL and RACE's folders, `encode` makes token ids of texts, and `dataset` holds them and
orders the epochs.
"""

from megazero.data.labelled.dataset import UNKNOWN_LABEL, EpochOrder, LabelledSamples
from megazero.data.labelled.encode import SampleEncoder, encode_samples
from megazero.data.labelled.files import LabelledFile, LabelledText, read_labelled

__all__ = [
    "UNKNOWN_LABEL",
    "EpochOrder",
    "LabelledFile",
    "LabelledSamples",
    "LabelledText",
    "SampleEncoder",
    "encode_samples",
    "read_labelled",
]
