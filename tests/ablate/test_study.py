"""A folder of configurations: members, titles, lengths, and every reason to refuse it, at once."""

from __future__ import annotations

import pytest

from megazero.ablate.study import Wishes, chosen, read_study, with_teachers
from megazero.ablate.trial import trials_of
from megazero.errors import ConfigError
from tests.ablate.samples import write_study


def refused(folder, wishes=None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_study(folder, wishes or Wishes())
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
    study = read_study(folder, Wishes())
    assert [member.name for member in study.members] == ["dense", "wide", "wider"]
    assert [member.title for member in study.members] == ["", "Wide", "The widest:"]
    sizes = [(m.config.model.hidden_size, m.config.model.ffn_size) for m in study.members]
    assert sizes == [(8, 32), (16, 64), (16, 99)]
    assert not any(member.takes_corpus for member in study.members)


def test_flags_take_precedence_over_files(tmp_path):
    folder = write_study(tmp_path / "s", a="optimizer: {lr: 1.0}")
    (member,) = read_study(folder, Wishes(flags=("--lr", "3", "--weight-decay", "0"))).members
    assert (member.config.optimizer.lr, member.config.optimizer.weight_decay) == (3.0, 0.0)


@pytest.mark.parametrize(("steps", "interval"), [(2, 1), (40, 20), (1, 1)])
def test_steps_keep_the_number_of_evaluations(tmp_path, steps, interval):
    (member,) = read_study(write_study(tmp_path / "s", a=""), Wishes(steps=steps)).members
    training = member.config.training
    assert (training.train_iters, training.eval_interval) == (steps, interval)


def test_a_member_without_data_takes_the_corpus(tmp_path):
    folder = write_study(tmp_path / "s", a="", b="")
    (folder / "base.yaml").write_text((folder / "base.yaml").read_text().replace("mock_data: true, ", ""))
    (folder / "b.yaml").write_text("base: base.yaml\ndata: {data_path: [own]}\n")
    study = read_study(folder, Wishes(corpus=("--data-path", "quick")))
    assert [(m.takes_corpus, m.config.data.data_path) for m in study.members] == [
        (True, ("quick",)),
        (False, ("own",)),
    ]
    given = read_study(folder, Wishes(flags=("--data-path", "mine"), corpus=("--data-path", "quick")))
    assert [member.config.data.data_path for member in given.members] == [("mine",), ("mine",)]
    (folder / "a.yaml").write_text(
        "base: base.yaml\nmodel: {family: bert}\n"
        "tokenizer: {tokenizer_type: BertWordPieceCase, vocab_file: v}\n"
    )
    assert refused(folder, Wishes(corpus=("--data-path", "quick"))) == [
        "a: `family` must be gpt for the corpus that is prepared, but is bert; name data of your own, as in "
        "`megazero ablate FOLDER -- --data-path PREFIX`."
    ]


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
    members = read_study(write_study(tmp_path / "s", dense="", moe_top1="", moe_top2=""), Wishes()).members
    assert [m.name for m in chosen(members, ["moe-top2", "dense"], "--only")] == ["dense", "moe-top2"]
    assert chosen(members, [], "--only") == members
    with pytest.raises(ConfigError) as error:
        chosen(members, ["dens", "moe-top1", "xyzzy"], "--only")
    assert error.value.violations == [
        "`--only` must name members (dense, moe-top1, moe-top2), but is dens; did you mean dense?",
        "`--only` must name members (dense, moe-top1, moe-top2), but is xyzzy; correct it.",
    ]


def test_a_member_may_learn_from_another(tmp_path):
    taught = "distillation: {kd: true, load_teacher: %s}"
    folder = write_study(tmp_path / "s", a=taught % "b", b="", c=taught % "a", d=taught % "elsewhere")
    members = read_study(folder, Wishes()).members
    assert [member.teacher for member in members] == ["b", None, "a", None]
    assert [each.name for each in with_teachers(members[2:3], members)] == ["b", "a", "c"]
    first = trials_of(members, 1, 1, tmp_path / "out")
    assert [trial.member.name for trial in first] == ["b", "a", "c", "d"]
    assert first[1].config().distillation.load_teacher == first[0].saved
    assert first[3].config().distillation.load_teacher == "elsewhere"
    (folder / "b.yaml").write_text("base: base.yaml\noptimizer: {lr: 0.5}\n")
    again = trials_of(read_study(folder, Wishes()).members, 1, 1, tmp_path / "out")
    changed = [x.folder != y.folder for x, y in zip(first, again, strict=True)]
    assert changed == [True, True, True, False]  # a student of another teacher is another student


def test_members_that_learn_from_each_other_are_refused(tmp_path):
    taught = "distillation: {kd: true, load_teacher: %s}"
    folder = write_study(tmp_path / "s", a=taught % "b", b=taught % "a", c=taught % "c", d="")
    (said,) = refused(folder)
    assert said.startswith("a, b, c: `load_teacher` must name a member that does not learn from it")
