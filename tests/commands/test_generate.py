"""`megazero generate`: flags, prompts from files, what is printed and by whom."""

from __future__ import annotations

import json

import pytest

from megazero.commands.generate import main
from megazero.errors import CheckpointError
from megazero.inference.sampling import Sampling
from megazero.inference.text import TextGenerator
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.trained import AxisSizes, Loaded
from tests.inference.test_text import BYTES, byte_model
from tests.tables import over_table


def no_batches(arrays, samples):
    raise AssertionError("generation makes its own batches")


PASSED_OVER = "passed over iter_0000002: it is damaged"


@pytest.fixture
def loads(monkeypatch) -> list[tuple[str, Launch, AxisSizes]]:
    """Puts a model where a checkpoint would be; what was asked for."""
    asked = []

    def load(checkpoint_dir: str, launch: Launch, sizes: AxisSizes, verb: str, **foreign):
        assert verb == "generate"
        asked.append((checkpoint_dir, launch, sizes))
        return Loaded(
            solo_context(), {0: byte_model()}, (0,), BYTES, (PASSED_OVER,), no_batches, iteration=30
        )

    monkeypatch.setattr("megazero.train.resume.trained.load_for_inference", load, raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return asked


def expected(prompts: list[str], new: int, **fields) -> list[str]:
    texts = TextGenerator(byte_model(), BYTES).complete(
        prompts, max_new_tokens=new, sampling=Sampling(**fields)
    )
    return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


def test_one_prompt_prints_the_whole_text_and_nothing_else(loads, capsys):
    assert main(["--load", "here", "--prompt", "de", "--max-new-tokens", "5", "--greedy"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected(["de"], 5, greedy=True)[0] + "\n"
    assert captured.err == f"warning: {PASSED_OVER}\n"
    assert loads == [("here", Launch(), AxisSizes())]


def test_texts_are_kept_for_the_page_of_the_run(loads, capsys, tmp_path):
    flags = ["--load", str(tmp_path), "--max-new-tokens", "5", "--greedy", "--save-samples"]
    for prompt in ("de", "a"):
        assert main([*flags, "--prompt", prompt]) == 0
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [record["prompt"] + record["text"] for record in records] == expected(["de", "a"], 5, greedy=True)
    assert [record["iteration"] for record in records] == [30, 30]
    assert main([*flags[2:], "--load", str(tmp_path / "missing"), "--prompt", "a"]) == 2
    assert "error: `--load` must be a folder that can be written, but: " in capsys.readouterr().err


def test_the_sizes_arrive(loads):
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "3"]
    assert main(["--load", "here", "--prompt", "a", "--max-new-tokens", "1", *flags]) == 0
    assert loads == [("here", Launch(), AxisSizes(2, 3))]


def test_every_sampling_flag_arrives(loads, capsys):
    flags = [
        "--temperature",
        "0.7",
        "--top-k",
        "30",
        "--top-p",
        "0.8",
        "--seed",
        "9",
        "--max-new-tokens",
        "6",
    ]
    assert main(["--load", "here", "--prompt", "abc", *flags]) == 0
    want = expected(["abc"], 6, temperature=0.7, top_k=30, top_p=0.8, seed=9)
    assert capsys.readouterr().out == want[0] + "\n"


def test_samples_of_several_prompts_are_told_apart(loads, capsys):
    flags = ["--num-samples", "2", "--max-new-tokens", "4", "--batch-size", "3"]
    assert main(["--load", "here", "--prompt", "a", "--prompt", "b", *flags]) == 0
    want = expected(["a", "a", "b", "b"], 4)
    assert want[0] != want[1]
    titles = [f"--- prompt {p}, sample {s} ---" for p in (1, 2) for s in (1, 2)]
    lines = "\n".join(f"{title}\n{text}" for title, text in zip(titles, want, strict=True))
    assert capsys.readouterr().out == lines + "\n"


def test_a_file_has_one_prompt_per_line(loads, capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("é \x0cx\r\n\nlast".encode())
    assert main(["--load", "here", "--prompt-file", str(path), "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    for text in expected(["é \x0cx", "", "last"], 3):
        assert f" ---\n{text}\n" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"good\nb\xffd\n", "line 2 is not: invalid start byte"), (None, "readable file")],
)
def test_a_bad_prompt_file_is_refused_before_anything_is_loaded(loads, capsys, tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["--load", "here", "--prompt-file", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: `--prompt-file` must")
    assert message in captured.err
    assert captured.out == ""
    assert loads == []


def test_a_prompt_that_is_not_utf_8_is_refused(loads, capsys):
    assert main(["--load", "here", "--prompt", "good", "--prompt", "b\udcff"]) == 1
    assert "`--prompt` must be UTF-8, but number 2 is 'b\\udcff'" in capsys.readouterr().err
    assert loads == []


@pytest.mark.parametrize("flags", [["--top-p", "2"], ["--temperature", "0"], ["--num-samples", "0"]])
def test_bad_values_exit_2_before_anything_is_loaded(loads, capsys, flags):
    assert main(["--load", "here", "--prompt", "a", *flags]) == 2
    assert "must be" in capsys.readouterr().err
    assert loads == []


def test_a_missing_checkpoint_is_one_line_and_a_status(monkeypatch, capsys):
    def load(checkpoint_dir: str, launch: Launch, sizes: AxisSizes, verb: str, **foreign):
        raise CheckpointError(f"`load` must hold a checkpoint, but {checkpoint_dir} has none")

    monkeypatch.setattr("megazero.train.resume.trained.load_for_inference", load, raising=False)
    assert main(["--load", "void", "--prompt", "a"]) == 1
    assert capsys.readouterr().err == "error: `load` must hold a checkpoint, but void has none\n"


@over_table("flags", [["--prompt", "a"], ["--load", "x"], ["--load", "x", "--prmpt", "a"]])
def test_missing_or_unknown_flags_exit_2(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2


def test_only_the_first_rank_prints(loads, capsys, monkeypatch):
    world = ThreadWorld(1)
    context = thread_context(world, ProcessGrid(), 0)
    silent = type(context)(ProcessGrid(tp=2), 1, context.device, context.groups, context.plan)
    monkeypatch.setattr(
        "megazero.train.resume.trained.load_for_inference",
        lambda *_, **__: Loaded(silent, {0: byte_model()}, (0,), BYTES, (PASSED_OVER,), no_batches),
    )
    assert main(["--load", "here", "--prompt", "a", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr() == ("", "")


def test_keys_and_values_may_be_kept_in_8_bits(loads, capsys):
    line = ["--load", "here", "--prompt", "de", "--max-new-tokens", "5", "--greedy", "--kv-cache-dtype"]
    assert main([*line, "int8"]) == 0
    # A first block that is not full stays as it is.
    assert capsys.readouterr().out == expected(["de"], 5, greedy=True)[0] + "\n"
    with pytest.raises(SystemExit):
        main([*line, "int4"])
    assert "--kv-cache-dtype" in capsys.readouterr().err
