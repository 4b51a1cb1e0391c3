"""A folder of configurations: members, titles, lengths, and every reason to refuse it, at once."""

from __future__ import annotations

import pytest

from megazero.ablate.study import StudyOptions, chosen, read_study, with_teachers
from megazero.ablate.trial import trials_of
from megazero.errors import ConfigError
from tests.ablate.samples import BASE, write_study
from tests.tables import over_table


def refused(folder, options=None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_study(folder, options or StudyOptions())
    return error.value.violations


def test_members_are_the_files_that_are_not_named_as_a_base(tmp_path):
    folder = write_study(
        tmp_path / "s", base_wide="model: {hidden_size: 16}", dense="# comes too late", wide="", wider=""
    )
    (folder / "wide.yaml").write_text("\n#   Wide   \nbase: base-wide.yaml")
    (folder / "wider.yaml").write_text(
        "# The widest:\n# more\nbase: wide.yaml\nmodel: {ffn_hidden_size: 99}\n"
    )
    (folder / "notes.txt").write_text("not one")
    study = read_study(folder, StudyOptions())
    assert [member.name for member in study.members] == ["dense", "wide", "wider"]
    assert [member.title for member in study.members] == ["", "Wide", "The widest:"]
    sizes = [(m.config.model.hidden_size, m.config.model.ffn_size) for m in study.members]
    assert sizes == [(8, 32), (16, 64), (16, 99)]
    assert not any(member.takes_corpus for member in study.members)


@pytest.mark.fast
def test_flags_take_precedence_over_files(tmp_path):
    folder = write_study(tmp_path / "s", a="optimizer: {lr: 1.0}")
    (member,) = read_study(folder, StudyOptions(flags=("--lr", "3", "--weight-decay", "0"))).members
    assert (member.config.optimizer.lr, member.config.optimizer.weight_decay) == (3.0, 0.0)


@over_table(("steps", "interval"), [(2, 1), (40, 20), (1, 1)])
def test_steps_keep_the_number_of_evaluations(tmp_path, steps, interval):
    (member,) = read_study(write_study(tmp_path / "s", a=""), StudyOptions(steps=steps)).members
    training = member.config.training
    assert (training.train_iters, training.eval_interval) == (steps, interval)


def test_a_training_at_a_share_has_everything_at_the_same_places(tmp_path):
    """Each count by hand; what happens per step happens the more often."""
    text = """
optimizer: {lr: 0.01, lr_warmup_tokens: 640, lr_decay_tokens: 6400}
training: {train_iters: null, train_tokens: 6400, eval_interval: 100, eval_iters: 1}
batch: {micro_batch_size: 2, global_batch_size: 8, rampup_batch_size: [2, 2, 90]}
curriculum: {seqlen_schedule: fixed_discrete, seqlen_difficulty: [4, 8], seqlen_max_step: [30]}
skipping: {random_ltd: true, random_ltd_layer_id: [0], random_ltd_min_value: 4, random_ltd_require_steps: 40,
           random_ltd_seq_per_step: 1, progressive_layer_drop: true, pld_gamma: 0.01}
data_sampling:
  curriculum_metrics:
    rare: {index_to_sample_path: a, index_to_metric_path: b, min_difficulty: 1, max_difficulty: 9,
           schedule_type: fixed_linear, schedule_config: {total_curriculum_step: 50}}
"""
    base = tmp_path / "s"
    write_study(base, a=text)
    (base / "base.yaml").write_text(BASE.replace("train_iters: 4, ", ""))
    whole, half = read_study(base, StudyOptions(shares=(1, 0.5))).members
    assert (whole.name, half.name, half.file) == ("a", "a@0.5", "a")
    counts = {
        "training": {"train_tokens": 3200, "eval_interval": 50, "eval_iters": 1},
        "optimizer": {"lr": 0.01, "lr_warmup_tokens": 320, "lr_decay_tokens": 3200},
        "batch": {"global_batch_size": 8, "rampup_batch_size": (2, 2, 45)},
        "curriculum": {"seqlen_difficulty": (4, 8), "seqlen_max_step": (15,)},
        "skipping": {"random_ltd_min_value": 4, "random_ltd_require_steps": 20, "pld_gamma": 0.02},
    }
    for section, values in counts.items():
        assert {name: getattr(getattr(half.config, section), name) for name in values} == values
    (metric,) = half.config.data_sampling.curriculum_metrics
    assert (metric.total_curriculum_step, metric.max_difficulty) == (25, 9)
    assert whole.config == read_study(base, StudyOptions()).members[0].config


def test_a_share_of_so_many_steps(tmp_path):
    members = read_study(
        write_study(tmp_path / "s", a=""), StudyOptions(steps=40, shares=(1, 0.5, 2))
    ).members
    assert [(m.name, m.config.training.train_iters, m.config.training.eval_interval) for m in members] == [
        ("a", 40, 20),
        ("a@0.5", 20, 10),
        ("a@2", 80, 40),
    ]


def test_a_file_is_chosen_with_all_its_lengths(tmp_path):
    members = read_study(write_study(tmp_path / "s", a="", b=""), StudyOptions(shares=(1, 0.5))).members
    assert [member.name for member in chosen(members, ["a", "b@0.5"], "--only")] == ["a", "a@0.5", "b@0.5"]


def test_a_member_without_data_takes_the_corpus(tmp_path):
    folder = write_study(tmp_path / "s", a="", b="")
    (folder / "base.yaml").write_text((folder / "base.yaml").read_text().replace("mock_data: true, ", ""))
    (folder / "b.yaml").write_text("base: base.yaml\ndata: {data_path: [own]}\n")
    quick = {"gpt": ("--data-path", "quick"), "bert": ("--data-path", "prose")}
    study = read_study(folder, StudyOptions(corpus=quick))
    assert [(m.takes_corpus, m.config.data.data_path) for m in study.members] == [
        (True, ("quick",)),
        (False, ("own",)),
    ]
    given = read_study(folder, StudyOptions(flags=("--data-path", "mine"), corpus=quick))
    assert [member.config.data.data_path for member in given.members] == [("mine",), ("mine",)]
    (folder / "a.yaml").write_text(
        "base: base.yaml\nmodel: {family: bert}\n"
        "tokenizer: {tokenizer_type: BertWordPieceCase, vocab_file: v}\n"
    )
    assert read_study(folder, StudyOptions(corpus=quick)).members[0].config.data.data_path == ("prose",)


def test_every_reason_is_given_at_once_and_shared_ones_once(tmp_path):
    folder = write_study(
        tmp_path / "s",
        a="optimizer: {lr: fast}\ncheckpoint: {load: elsewhere}",
        b="model: {num_layres: 2, num_attention_heads: 3}",
        c="checkpoint: {save: here, load: there}\ntraining: {eval_iters: 0}\nlogging: {metrics_jsonl: m}",
    )
    reasons = refused(folder)
    assert [reason.partition(" must")[0] for reason in reasons] == [
        f"a: {folder}/a.yaml:2: `optimizer.lr`",
        f"b: {folder}/b.yaml:2: unknown key `model.num_layres`; did you mean `model.num_layers`?",
        reasons[2].partition(" must")[0],
        "c: `checkpoint.save`",
        "c: `checkpoint.load`",
        "c: `logging.metrics_jsonl`",
        "c: `eval_iters`",
    ]
    assert "num_attention_heads" in reasons[2]
    assert reasons[3] == (
        "c: `checkpoint.save` must be left to the command, which gives each run a folder of its own, but is "
        "here; leave it out."
    )


def test_what_is_wrong_with_the_base_concerns_all_that_are_built_on_it(tmp_path):
    folder = write_study(tmp_path / "s", a="", b="")
    (folder / "base.yaml").write_text("modle: {}\n")
    assert f"a, b: {folder}/base.yaml:1: unknown key `modle`; did you mean `model`?" in refused(folder)


def test_a_folder_without_members_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases/base.yaml").write_text("")
    for name in ("empty", "bases"):
        assert refused(tmp_path / name) == [
            f"{tmp_path}/{name} must hold a configuration (*.yaml) whose name does not begin with `base`, "
            "but has none; add one."
        ]
    assert refused(tmp_path / "none") == [
        f"the folder of configurations must exist, but {tmp_path}/none does not; correct the path."
    ]


def test_members_are_chosen_by_name(tmp_path):
    members = read_study(
        write_study(tmp_path / "s", dense="", moe_top1="", moe_top2=""), StudyOptions()
    ).members
    assert [m.name for m in chosen(members, ["moe-top2", "dense"], "--only")] == ["dense", "moe-top2"]
    assert chosen(members, [], "--only") == members
    with pytest.raises(ConfigError) as error:
        chosen(members, ["dens", "moe-top1", "xyzzy"], "--only")
    assert error.value.violations == [
        "`--only` must name members (dense, moe-top1, moe-top2), but is dens; did you mean dense?",
        "`--only` must name members (dense, moe-top1, moe-top2), but is xyzzy; correct it.",
    ]


def test_a_member_may_learn_from_another(tmp_path):
    distilled = "distillation: {kd: true, load_teacher: %s}"
    folder = write_study(
        tmp_path / "s", a=distilled % "b", b="", c=distilled % "a", d=distilled % "elsewhere"
    )
    members = read_study(folder, StudyOptions()).members
    assert [member.teacher for member in members] == ["b", None, "a", None]
    assert [each.name for each in with_teachers(members[2:3], members)] == ["b", "a", "c"]
    first = trials_of(members, 1, 1, tmp_path / "out")
    assert [trial.member.name for trial in first] == ["b", "a", "c", "d"]
    assert first[1].config().distillation.load_teacher == first[0].saved
    assert first[3].config().distillation.load_teacher == "elsewhere"
    (folder / "b.yaml").write_text("base: base.yaml\noptimizer: {lr: 0.5}\n")
    again = trials_of(read_study(folder, StudyOptions()).members, 1, 1, tmp_path / "out")
    changed = [x.folder != y.folder for x, y in zip(first, again, strict=True)]
    assert changed == [True, True, True, False]  # a student of another teacher is another student


def test_members_that_learn_from_each_other_are_refused(tmp_path):
    distilled = "distillation: {kd: true, load_teacher: %s}"
    folder = write_study(tmp_path / "s", a=distilled % "b", b=distilled % "a", c=distilled % "c", d="")
    (said,) = refused(folder)
    assert said.startswith("a, b, c: `load_teacher` must name a member that does not learn from it")
