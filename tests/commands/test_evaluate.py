"""`megazero evaluate`: Megatron's line on any layout, lines of public scripts, and what is refused."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero import cli
from megazero.commands import finetune
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch, grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain
from megazero.train.resume.trained import load_for_inference
from tests.config.compat.launch_lines import read_lines
from tests.formats.hf.samples import LLAMA, config_for, their_tensors, write_folder
from tests.harness.megatron import literal
from tests.harness.megatron.test_windows import logits_of
from tests.tables import over_table
from tests.train.test_foreign import write_megatron

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 40 --max-position-embeddings 40 "
    "--micro-batch-size 4 --global-batch-size 8 --train-iters 40 --lr 2e-2 --eval-iters 0 --log-interval 100"
)
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file {0}/vocab.json --merge-file {0}/merges.txt"
WIKI = " = Fox = \n \n The fox , it 's said , jumps @-@ over N dogs . \n"
TEXTS = ["The fox jumps over the", "the dogs", "it jumps over the fox", "a fox jumps", "the fox , dogs"]
LONG = "the dogs over the fox jumps over the dogs, it is said"


def write_gpt2(folder: Path) -> None:
    """Write the files of a GPT-2 tokenizer: the 256 bytes, a few merges, and the end of a document."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in kept)}
    letters = [chr(moved.get(byte, byte)) for byte in range(256)]
    merges = ["t h", "Ġ f", "o x", "Ġf ox", "j u", "m p"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a small GPT in `run`, a BERT in `bert`, their tokenizer and the files of both tasks."""
    folder = tmp_path_factory.mktemp("trained")
    write_gpt2(folder)
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    encode = build_tokenizer(TokenizerSpec("GPT2BPETokenizer", *files)).encode
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        writer.add_document([np.array(encode("the fox jumps over the dogs" * 200))])
    common = f"{SHAPE} {GPT2}".format(folder).split()
    gpt = [*common, "--data-path", f"{folder}/text", "--split", "1,0,0", "--save", f"{folder}/run"]
    pretrain(parse_config(gpt, world_size=1).config, Launch())
    bert = f"{SHAPE} --vocab-size 64 --model-family bert --mock-data --train-iters 1 --save {folder}/bert"
    pretrain(parse_config(bert.split(), world_size=1).config, Launch())
    (folder / "wiki.test.tokens").write_text(WIKI * 9)
    for name, texts in (("short", TEXTS), ("lambada_test", [*TEXTS, LONG])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    (folder / "latin.wiki").write_bytes(b"caf\xe9 au lait")
    (folder / "one.wiki").write_text("word\n")
    (folder / "other.txt").write_text("two words")
    return folder


def shown(capsys, *argv: str) -> list[str]:
    capsys.readouterr()
    assert cli.main(["evaluate", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def same(line: str, other: str) -> bool:
    """Whether lines are equal but for the rounding of numbers."""
    number = re.compile(r"\d[\d.]*(?:E[+-]\d+)?")
    if number.sub("#", line) != number.sub("#", other):
        return False
    pairs = zip(number.findall(line), number.findall(other), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=2e-4) for a, b in pairs)


def model_and_encode(folder: Path):
    loaded = load_for_inference(f"{folder}/run", Launch())
    (model,) = loaded.chunks.values()
    return logits_of(model), loaded.tokenizer.encode


@pytest.mark.parametrize(("stride", "s"), [(8, 40), (0, 40), (40, 40), (5, 12)])
def test_wikitext(trained, capsys, stride, s):
    path = f"{trained}/wiki.test.tokens"
    spans = f"--overlapping-eval {stride} --seq-length {s}"
    flags = f"--task WIKITEXT103 --valid-data {path} --load {trained}/run {spans}"
    rule, line, under, scored, theirs = shown(capsys, *flags.split())
    logits, encode = model_and_encode(trained)
    running = " = Fox =\n\nThe fox, it's said, jumps-over 1 dogs.\n".replace(" = Fox =", "= Fox =") * 9
    tokens = encode(f" {running[:-1]}\n")
    assert same(line, literal.wikitext_line(logits, tokens, WIKI * 9, s, stride or s, 262))
    assert rule == under == "-" * (len(line) + 1)
    assert re.fullmatch(rf"scored {len(tokens) - 1} tokens, each once, in \d+ windows", scored)
    values = [float(value) for value in re.findall(r"[\d.]+(?:e[+-]\d+)?", theirs)]
    words, size = len(re.split(r"\s+", WIKI * 9)), len(WIKI) * 9
    assert values[0] ** (words / size) == pytest.approx(values[1], rel=1e-4)
    assert 2 ** values[2] == pytest.approx(values[1], rel=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_lambada(trained, capsys, strict):
    flags = ["--task", "LAMBADA", "--load", f"{trained}/run", *["--strict-lambada"] * strict, "--valid-data"]
    _, line, _, scored, theirs = shown(capsys, *flags, f"{trained}/short.jsonl")
    logits, encode = model_and_encode(trained)
    right = literal.lambada_correct(logits, TEXTS, encode, strict=strict)
    assert 0 < sum(right) < len(TEXTS)
    assert line == (
        f" validation results on LAMBADA | number correct: {sum(right):.4E} | total examples: "
        f"{len(TEXTS):.4E} | avg accuracy: {sum(right) / len(TEXTS):.4E}"
    )
    assert scored.endswith("of 5 texts, each once")
    assert re.fullmatch(r"by lm-evaluation-harness: acc: 0.[24], perplexity: [\d.e+]+", theirs)
    long = shown(capsys, *flags, f"{trained}/lambada_test.jsonl")[3]
    assert long.endswith("of 6 texts, each once; the beginning of 1 was cut, to 41 tokens")


LAYOUTS = {
    "D2": ("", 2),
    "D3": ("", 3),
    "T2": ("--tensor-model-parallel-size 2", 2),
    "interleaved": ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
    "T2P2D2": ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "task", ["WIKITEXT103 --valid-data {}/wiki.test.tokens", "LAMBADA --valid-data {}/lambada_test.jsonl"]
)
def test_any_layout_prints_the_same(trained, capsys, monkeypatch, name, task):
    """An interleaved pipeline, at which Megatron stops with status 0, is one of stages here."""
    flags = f"--task {task} --load {{}}/run --micro-batch-size 2".format(trained, trained).split()
    alone = shown(capsys, *flags)
    extra, ranks = LAYOUTS[name]
    world, place = ThreadWorld(ranks), threading.local()
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(Launch, "from_environment", lambda: Launch(place.rank, ranks))
    monkeypatch.setattr(
        "megazero.train.resume.trained.join",
        lambda parallel, launch: thread_context(world, grid_of(parallel, ranks), launch.rank),
    )

    def work(rank: int) -> int:
        place.rank = rank
        return cli.main(["evaluate", *flags, *extra.split()])

    assert world.run(work) == [0] * ranks
    spread = capsys.readouterr().out.splitlines()
    assert len(spread) == len(alone)
    assert all(map(same, spread, alone))


SCRIPTS = {
    # Megatron-DeepSpeed's examples/evaluate_zeroshot_gpt.sh
    "examples": "--task LAMBADA --valid-data {0}/lambada_test.jsonl --tokenizer-type GPT2BPETokenizer "
    "--strict-lambada --vocab-file {0}/vocab.json --merge-file {0}/merges.txt --load {0}/run "
    "--tensor-model-parallel-size 1 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --batch-size 8 "
    "--seq-length 40 --max-position-embeddings 40 --log-interval 10 --fp16 --no-load-optim --no-load-rng",
    # Megatron-LM's README
    "readme": "--task WIKITEXT103 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 40 "
    "--max-position-embeddings 40 --fp16 --vocab-file {0}/vocab.json --valid-data {0}/wiki.test.tokens "
    "--tokenizer-type GPT2BPETokenizer --merge-file {0}/merges.txt --load {0}/run --micro-batch-size 8 "
    "--checkpoint-activations --log-interval 10 --no-load-optim --no-load-rng",
    # a study of DeepSpeed's, whose line has a flag of the other task
    "study": "--task WIKITEXT103 --tokenizer-type GPT2BPETokenizer --strict-lambada --vocab-file "
    "{0}/vocab.json --merge-file {0}/merges.txt --valid-data {0}/wiki.test.tokens --load {0}/run "
    "--micro-batch-size 8 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 40 "
    "--max-position-embeddings 40 --log-interval 10 --fp16 --no-load-optim --no-load-rng",
    # Llama's, whose model is the checkpoint's
    "llama": "--task WIKITEXT103 --seq-length 40 --max-position-embeddings 40 --bf16 --valid-data "
    "{0}/wiki.test.tokens --load {0}/run --micro-batch-size 4 --log-interval 10 --no-load-optim "
    "--no-load-rng --overlapping-eval 40 --attention-softmax-in-fp32 --ckpt-format torch "
    "--use-checkpoint-args --use-mp-args-from-checkpoint-args",
    # a script of a mixture of experts, which names the step and evaluates only
    "step": "--use-mcore-models --no-rope-fusion --seq-length 40 --max-position-embeddings 40 --num-layers 2 "
    "--hidden-size 32 --num-attention-heads 4 --init-method-std 0.01 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --no-masked-softmax-fusion --use-flash-attn --vocab-file {0}/vocab.json "
    "--merge-file {0}/merges.txt --tokenizer-type GPT2BPETokenizer --make-vocab-size-divisible-by 1024 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1 --load "
    "{0}/run --ckpt-step 40 --no-load-rng --no-load-optim --micro-batch-size 8 --bf16 "
    "--no-gradient-accumulation-fusion --epochs 0 --keep-last --task LAMBADA --valid-data "
    "{0}/lambada_test.jsonl --strict-lambada",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_of_public_scripts(trained, capsys, name):
    """Only sizes and paths are changed; the precision is the checkpoint's, and a warning says so."""
    capsys.readouterr()
    assert cli.main(["evaluate", *SCRIPTS[name].format(trained).split()]) == 0
    said = capsys.readouterr()
    task = SCRIPTS[name].split("--task ")[1].split()[0]
    assert said.out.splitlines()[1].startswith(f" validation results on {task} | ")
    dtype = "bf16" if "--bf16" in SCRIPTS[name] else "fp16"
    assert f"warning: the model computes in torch.float32, as trained, not {dtype}" in said.err


TASK = "--task WIKITEXT103 --valid-data {0}/wiki.test.tokens --load {0}/run"


@over_table(
    ("flags", "words"),
    [
        (TASK.replace("{0}/run", "{0}/none"), "`load` must hold a checkpoint, but "),
        (TASK.replace("{0}/run", "{0}/bert"), "must hold a model that reads from left to right"),
        (TASK.replace("--load {0}/run", ""), "`--load` must name the checkpoint"),
        (TASK + " --num-layers 3", "`--num-layers` must be what "),
        (TASK + " --seq-lenght 3", "unknown flag `--seq-lenght`"),
        (TASK + " --overlapping-eval 41", "`--overlapping-eval` must be at most the sequence length 40"),
        (TASK + " --seq-length 41", "`seq_length`"),
        (TASK.replace("wiki.test.tokens", "missing.wiki"), "`--valid-data` must be readable UTF-8 text"),
        (TASK.replace("wiki.test.tokens", "latin.wiki"), "`--valid-data` must be readable UTF-8 text"),
        (TASK.replace("wiki.test.tokens", "other.txt"), "must have ptb, wiki, lambada in its path"),
        (TASK.replace("wiki.test.tokens", "one.wiki"), "`--valid-data` must hold two words or more"),
        (
            TASK.replace("wiki.test.tokens", "one.wiki {0}/one.wiki"),
            "`--valid-data` must be one file, but is 2",
        ),
        (TASK.replace("WIKITEXT103", "LAMBADA"), "line 1 is none"),
        ("--task RET-FINETUNE-NQ", "but is RET-FINETUNE-NQ; retrieval and regression are not offered"),
        ("--task STS-B", "but is STS-B; retrieval and regression are not offered"),
    ],
)
def test_bad_input(trained, capsys, flags, words):
    capsys.readouterr()
    try:
        status = cli.main(["evaluate", *flags.format(trained).split()])
    except SystemExit as ended:
        status = ended.code
    assert status != 0
    assert words in capsys.readouterr().err


def test_lines_of_other_tasks_become_fine_tuning(monkeypatch, capsys):
    """Those of Megatron-DeepSpeed's examples, each of a BERT, which a line need not say there."""
    ran: list[list[str]] = []
    monkeypatch.setattr(finetune, "main", lambda words: ran.append(words) or 0)
    lines = [x for x in read_lines() if x.program == "tasks/main.py" and "LAMBADA" not in x.argv]
    assert [line.argv[line.argv.index("--task") + 1] for line in lines] == ["MNLI", "QQP", "RACE"]
    for line in lines:
        argv = [
            word for word in line.argv if word not in ("--deepspeed", "--deepspeed_config", "ds_config.json")
        ]
        assert cli.main(["evaluate", *argv, "--keep-last"]) == 0
        assert f"is fine-tuning: megazero finetune {' '.join(ran[-1])}\n" in capsys.readouterr().err
        config = parse_config(ran[-1], world_size=8).config
        section = config.finetune
        assert (config.model.family, section.train_data, section.valid_data[0]) == ("bert", ("a",), "b")
        assert section.epochs == int(argv[argv.index("--epochs") + 1])
    assert cli.main(["evaluate", "--task", "RACE", "--valid-data", "v", "--pretrained-checkpoint", "p"]) == 0
    assert " ".join(ran[-1]).startswith(
        "--task RACE --epochs 0 --lr 1 --pretrained-checkpoint p --model-family"
    )


def test_a_fine_tuning_runs(tmp_path, capsys):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    rows = ["index\tsentence1\tsentence2\tlabel"]
    rows += [f"{i}\tred\tblue\t{label}" for i, label in enumerate(("entailment", "not_entailment") * 4)]
    (tmp_path / "rte.tsv").write_text("\n".join(rows) + "\n")
    shape = SHAPE.replace("--train-iters 40 ", "").replace("--eval-iters 0 ", "")
    flags = f"--task RTE --train-data {tmp_path}/rte.tsv --valid-data {tmp_path}/rte.tsv --epochs 1 {shape}"
    flags += f" --tokenizer-type BertWordPieceLowerCase --vocab-file {tmp_path}/vocab.txt"
    assert cli.main(["evaluate", *flags.split()]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_folders_of_other_libraries(tmp_path, capsys):
    """Megatron's and Hugging Face's load as they are, and contradictions are named."""
    tokenizers = pytest.importorskip("tokenizers")
    write_megatron(tmp_path / "megatron")
    write_folder(tmp_path / "hf", config_for(LLAMA), their_tensors(LLAMA))
    vocab = {"<unk>": 0, "</s>": 1, **{word: i for i, word in enumerate(["the", "fox", "jumps", "over"], 2)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "wiki").write_text("the fox jumps over the fox " * 5)
    task = f"--task WIKITEXT103 --valid-data {tmp_path}/wiki --overlapping-eval 4 --seq-length 16"
    theirs = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/hf --vocab-size 101"
    megatron = f"{task} --load {tmp_path}/megatron {theirs} --num-layers 4 --num-attention-heads 4 --swiglu"
    for line in (f"{megatron} --trust-pickle", f"{task} --load {tmp_path}/hf"):
        figures, _, scored = shown(capsys, *line.split())[1:4]
        assert figures.endswith("| token ratio: 1.0 |")
        assert scored == "scored 29 tokens, each once, in 5 windows"
    for line, words in (
        (megatron, "`--trust-pickle` must be given"),
        (f"{megatron} --trust-pickle --normalization LayerNorm", "`--normalization` must be what "),
        (f"{task} --load {tmp_path}/hf --hidden-size 32", "`--hidden-size` must be what "),
    ):
        with pytest.raises(SystemExit):
            cli.main(["evaluate", *line.split()])
        assert words in capsys.readouterr().err
