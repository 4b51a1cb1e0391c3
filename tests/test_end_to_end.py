"""The whole way on real text, as a user goes it: corpus, tokenizer, dataset, training, text, Hugging Face."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from megazero.models.batch import Batch
from megazero.mpu.launch import Launch
from megazero.train.resume.trained import load_for_inference
from tests.forks import run, run_ranks

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [
    "argparse.py",
    "ast.py",
    "bisect.py",
    "calendar.py",
    "copy.py",
    "csv.py",
    "dis.py",
    "enum.py",
    "glob.py",
]

COMMON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 4 "
    "--global-batch-size 16 --train-iters 40 --lr 5e-3 --lr-warmup-iters 4 --hidden-dropout 0 "
    "--attention-dropout 0 --split 90,10,0 --eval-interval 40 --eval-iters 2 --log-interval 20"
)
SHAPES = {
    "gpt2": "",
    "llama": "--use-rotary-position-embeddings --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-key-value-heads 2 --sequence-parallel "
    "--tensor-model-parallel-size 2",
}


def call(*command: object) -> str:
    return output(run(*command, environment={"TOKENIZERS_PARALLELISM": "false"}))


def output(done: CompletedProcess[str]) -> str:
    """What a command line that must have succeeded printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with a tokenizer and a dataset of some standard library sources."""
    folder = tmp_path_factory.mktemp("data")
    library = Path(sysconfig.get_path("stdlib"))
    lines = [json.dumps({"text": (library / name).read_text(encoding="utf-8")}) for name in TEXTS * 2]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    call(
        "data_tools/train_tokenizer.py",
        "--input",
        folder / "corpus.jsonl",
        "--output",
        folder,
        "--vocab-size",
        500,
    )
    call(
        *(
            "data_tools/preprocess_data.py",
            "--input",
            folder / "corpus.jsonl",
            "--output-prefix",
            folder / "d",
        ),
        *("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", folder / "vocab.json"),
        *("--merge-file", folder / "merges.txt", "--append-eod", "--workers", 2),
    )
    return folder


def train(shape: str, data: Path, folder: Path) -> list[dict]:
    metrics = folder / "metrics.jsonl"
    command = [
        "pretrain_gpt.py",
        *COMMON.split(),
        *SHAPES[shape].split(),
        *("--data-path", data / "d_text_document", "--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", data / "vocab.json", "--merge-file", data / "merges.txt"),
        *("--save", folder / "checkpoint", "--metrics-jsonl", metrics),
    ]
    for rank in run_ranks(command, command):
        output(rank)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_gpt2_learns_speaks_and_equals_transformers(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    records = train("gpt2", data, tmp_path)
    facts = json.loads(
        call("data_tools/inspect_dataset.py", data / "d_text_document", "--unigram-entropy", "--json")
    )
    assert records[0]["lm_loss"] == pytest.approx(math.log(500), rel=0.05)
    assert records[-1]["lm_loss"] < facts["unigram_entropy"] - 0.1
    assert records[-1]["consumed_tokens"] == 40 * 16 * 64
    text = call(
        *("-m", "megazero.cli", "generate", "--load", tmp_path / "checkpoint", "--prompt", "def "),
        *("--max-new-tokens", 20, "--greedy"),
    )
    assert "def " in text

    loaded = load_for_inference(str(tmp_path / "checkpoint"), Launch())
    model = loaded.chunks[0]
    call("-m", "megazero.cli", "checkpoint", "to-hf", tmp_path / "checkpoint", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    text = "def main(argv):\n    return sorted(argv)\n"
    tokens = torch.tensor([loaded.tokenizer.encode(text)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(text)["input_ids"] == tokens[0].tolist()
    assert theirs.generate(tokens[:, :5], max_new_tokens=4, do_sample=False).shape == (1, 9)
    with torch.no_grad():
        ours = model(Batch(tokens)).transpose(0, 1)[..., : model.vocab_size]
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_llama_trained_on_slices_equals_transformers(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    records = train("llama", data, tmp_path)
    assert records[-1]["lm_loss"] < records[0]["lm_loss"] - 1.0

    loaded = load_for_inference(str(tmp_path / "checkpoint"), Launch())
    assert loaded.context.world_size == 1, "it was trained on two"
    model = loaded.chunks[0]
    call("-m", "megazero.cli", "checkpoint", "to-hf", tmp_path / "checkpoint", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        ours = model(Batch(tokens)).transpose(0, 1)[..., : model.vocab_size]
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=0, atol=1e-5)
