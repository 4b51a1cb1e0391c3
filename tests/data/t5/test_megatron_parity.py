"""Samples of T5 are Megatron-Core's own: compared with the real one, where it is installed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about accelerators it would like to have
    pytest.importorskip("megatron.core.datasets.helpers_cpp")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

from megazero.data.t5.dataset import T5Dataset
from tests.data.bert.golden import golden_corpus
from tests.data.t5.golden import CASES, END, SENTINELS, SIZE, START, WORDS, digest, settings_of


def core_samples(prefix, case, monkeypatch) -> list[dict[str, np.ndarray]]:
    """The samples that Megatron-Core makes of the golden corpus."""
    # It asks for a rank without looking whether there are any.
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    spelled = {i: f"##{i}" if i < WORDS.size and WORDS.continues[i] else str(i) for i in range(SIZE)}
    tokenizer = SimpleNamespace(
        **{"cls": WORDS.cls, "sep": WORDS.sep, "mask": WORDS.mask, "pad": WORDS.pad},
        **{"bos": START, "eos": END, "additional_special_tokens_ids": list(SENTINELS)},
        inv_vocab=spelled,
        unique_identifiers={"class": "Golden"},
    )
    config = T5MaskedWordPieceDatasetConfig(
        random_seed=case.seed,
        sequence_length=case.encoder,
        sequence_length_decoder=case.decoder,
        blend=([prefix], None),
        split="100,0,0",
        path_to_cache=f"{prefix}-cache",
        tokenizer=tokenizer,
        masking_probability=case.mask_prob,
        short_sequence_probability=case.short_seq_prob,
        masking_max_ngram=10,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
    )
    builder = BlendedMegatronDatasetBuilder(
        T5MaskedWordPieceDataset, [case.num_samples, 0, 0], lambda: True, config
    )
    dataset = builder.build()[0]
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.encoder}-{case.decoder}-{case.seed}")
def test_samples_equal_megatron_cores(case, tmp_path, monkeypatch):
    indexed = golden_corpus(tmp_path)
    theirs = core_samples(str(indexed.prefix), case, monkeypatch)
    ours = T5Dataset(indexed, range(40), case.num_samples, settings_of(case))
    batch = ours.batch(range(len(ours)))
    assert len(ours) == len(theirs) == case.rows
    for name, key in (("tokens", "text_enc"), ("decoder_tokens", "text_dec"), ("loss_mask", "loss_mask")):
        np.testing.assert_array_equal(batch[name], np.stack([sample[key] for sample in theirs]))
    labels = np.where(batch["loss_mask"] > 0, batch["labels"], -1)
    np.testing.assert_array_equal(labels, np.stack([sample["labels"] for sample in theirs]))
    np.testing.assert_array_equal(batch["lengths"], [sample["enc_mask"].sum() for sample in theirs])
    np.testing.assert_array_equal(batch["truncated"], [sample["truncated"] for sample in theirs])
    assert digest(batch) == case.digest
