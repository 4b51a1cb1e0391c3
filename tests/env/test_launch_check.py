"""What a node checks before it waits for others: `pretrain_gpt_175b.sh` once waited in silence."""

from __future__ import annotations

import pytest

from megazero.env.launch_check import NodeLaunch, check_launch, main, node_problems
from megazero.errors import ConfigError
from tests.tables import over_table

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 2 --lr 1e-3 --tokenizer-type GPT2BPETokenizer --vocab-file {0}/v.json "
    "--merge-file {0}/m.txt --data-path {0}/first {0}/second"
)


def launch(nodes: int = 1, rank: int = 0, address: str = "localhost") -> NodeLaunch:
    return NodeLaunch("job.sh", 8, nodes, rank, address, 6000)


@over_table(
    ("node", "device", "gpus", "words"),
    [
        (launch(), "auto", 8, []),
        (launch(), "cpu", 0, []),
        (launch(), "auto", 2, ["this node must have 8 GPUs, but torch sees 2"]),
        (launch(nodes=2), "auto", 8, ["`MASTER_ADDR` must be the address of node 0 when NNODES is 2"]),
        (launch(nodes=2, address="10.0.0.1"), "auto", 8, []),
        (launch(nodes=2, rank=2, address="10.0.0.1"), "auto", 8, ["`NODE_RANK` must be below NNODES (2)"]),
        (launch(nodes=2, rank=5), "cuda", 0, ["8 GPUs", "`NODE_RANK`", "`MASTER_ADDR`"]),
    ],
)
def test_what_a_node_lacks(node, device, gpus, words):
    problems = list(node_problems(node, device, gpus))
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_every_missing_file_is_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        check_launch(launch(), FLAGS.format(tmp_path).split(), gpus=0)
    text = str(refusal.value)
    for name in ("first.idx", "v.json", "m.txt", "8 GPUs"):
        assert name in text


def test_a_launch_that_can_begin_says_what_it_waits_for(tmp_path):
    for name in ("v.json", "m.txt", "first.idx", "first.bin", "second.idx", "second.bin"):
        (tmp_path / name).write_text("{}")
    flags = FLAGS.format(tmp_path).split()
    assert check_launch(launch(), flags, 8) == "job.sh: starting 8 ranks on this node"
    first = check_launch(launch(nodes=2, address="10.0.0.1"), flags, 8)
    assert "node 0 of 2 waits at 10.0.0.1:6000 for the 1 others" in first
    second = check_launch(launch(nodes=2, rank=1, address="10.0.0.1"), flags, 8)
    assert second == "job.sh: node 1 of 2 joins the job at 10.0.0.1:6000"


def test_refused_flags_are_refused_before_files(capsys):
    status = main(["--gpus-per-node", "1", "--nnodes", "1", "--", "--num-layers", "0"])
    assert status == 2
    assert "`--num-layers` must be" in capsys.readouterr().err
