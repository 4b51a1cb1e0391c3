"""`megazero completion`: the script for bash, run by bash itself."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import pytest

from megazero.cli import VERBS
from megazero.cli import main as megazero
from megazero.commands.completion import _words
from megazero.config.flags import COMMANDS, FLAGS

# What a shell asks when someone presses the key: the words so far, the last of them incomplete.
ASK = r"""
source SCRIPT
complete -p megazero
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line."
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    COMP_WORDS[COMP_CWORD]=${COMP_WORDS[COMP_CWORD]%.}
    _shtab_megazero megazero "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    printf '%s\n' "${COMPREPLY[@]}" | sort | paste -sd ' '
done
"""
ASKED = {
    "megazero pl": "plan",
    "megazero plan --pri": "--price-per-hour",
    "megazero pretrain --tensor-model": "--tensor-model-parallel-size",
    "megazero pretrain --micro-batch-size 2 --lr-decay-style cosine-": "cosine-restarts",
    "megazero verify --no-inv": "",
    "megazero verify --zero-st": "--zero-stage",
    "megazero config --check-conf": "--check-config",
    "megazero pretrain --config megazero/co": "megazero/commands megazero/config",
    "megazero checkpoint insp": "inspect",
    "megazero checkpoint inspect --ten": "--tensors",
    "megazero completion ": "bash fish zsh",
    "megazero launch --hostf": "--hostfile",
}


def test_every_verb_and_every_flag_of_a_training_is_known():
    (verbs,) = (a for a in _words("files")._actions if isinstance(a, argparse._SubParsersAction))
    assert list(verbs.choices) == [verb.name for verb in VERBS]
    for verb in ("pretrain", "finetune", "config", "verify"):
        known = {text for action in verbs.choices[verb]._actions for text in action.option_strings}
        assert known >= {*FLAGS, *COMMANDS}


def test_bash_completes_verbs_flags_choices_and_files(tmp_path, capsys):
    pytest.importorskip("shtab")
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    assert megazero(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    lines = "".join(f"{line}\n" for line in ASKED)
    ask = ASK.replace("SCRIPT", str(tmp_path / "script"))
    ended = subprocess.run([bash, "-c", ask], input=lines, capture_output=True, text=True, check=True)
    registered, *answers = ended.stdout.splitlines()
    assert registered.endswith("_shtab_megazero megazero")
    assert dict(zip(ASKED, answers, strict=True)) == ASKED


@pytest.mark.slow
def test_the_other_shells_have_their_scripts(capsys):
    pytest.importorskip("shtab")
    for shell, sign in (("zsh", "#compdef megazero"), ("fish", "complete -c megazero")):
        assert megazero(["completion", shell]) == 0
        assert sign in capsys.readouterr().out


def test_a_missing_package_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert megazero(["completion", "bash"]) == 2
    assert "run `pip install shtab`" in capsys.readouterr().err


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit):
        megazero(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
