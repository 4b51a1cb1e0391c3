"""The keys of `--model_args`: those of the harness's own Megatron model and ours; all others are refused."""

from __future__ import annotations

import pytest

from megazero.errors import ConfigError
from megazero.harness.arguments import HarnessArguments
from megazero.harness.loading import fingerprint
from tests.tables import over_table

MEGATRON_LM = {
    "load": "run",
    "ckpt_step": 40,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "tok",
    "vocab_file": None,
    "merge_file": None,
    "devices": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "seq_length": 128,
    "micro_batch_size": 4,
    "max_gen_toks": 32,
    "use_dist_ckpt": True,
    "extra_args": "--no-rope-fusion --context-parallel-size 2 --trust-pickle",
}


def test_every_key_of_the_harness_s_model_is_taken_and_what_it_passes_is_not_trusted():
    passed = {"batch_size": "auto", "max_batch_size": None, "device": "cuda:0"}
    arguments = HarnessArguments.of({**MEGATRON_LM, **passed})
    assert (arguments.ckpt_step, arguments.seq_length, arguments.max_gen_toks) == (40, 128, 32)
    assert (arguments.context_parallel_size, arguments.trust_pickle) == (2, True)
    assert HarnessArguments.of({"pretrained": "folder"}).load == "folder"


@over_table(
    ("given", "message"),
    [
        ({}, "must name the model's folder"),
        ({"load": "x", "tensor_model_paralel_size": 2}, "did you mean `tensor_model_parallel_size`"),
        ({"load": "x", "seq_length": "many"}, "`seq_length` in `--model_args` must be of its kind"),
        ({"load": "x", "extra_args": "--nonsense 3"}, "but has --nonsense"),
        ({"load": "x", "extra_args": "'"}, "must be flags"),
    ],
)
def test_others_are_refused_in_a_sentence(given, message):
    with pytest.raises(ConfigError, match=message):
        HarnessArguments.of(given)


def test_answers_of_two_checkpoints_and_of_two_settings_are_kept_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = HarnessArguments.of({"load": str(tmp_path)})
    before = fingerprint(first)
    assert before == fingerprint(
        HarnessArguments.of({"load": str(tmp_path), "tensor_model_parallel_size": 2})
    )
    assert before != fingerprint(HarnessArguments.of({"load": str(tmp_path), "seq_length": 8}))
    (tmp_path / "config.json").write_text("{ }")
    assert before != fingerprint(first)
