"""Tokenizers by name: found in the cache, fetched, or refused with the command that fetches them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.compat import hub
from megazero.config.resolve import parse_config
from megazero.errors import DataError
from tests.config.samples import BASE_FLAGS

NAME = "some-owner/some.tokenizer"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, commit: str, main: bool = True) -> Path:
    repository = cache / "models--some-owner--some.tokenizer"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    if main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    return folder


def test_a_name_is_no_path(tmp_path: Path) -> None:
    assert hub.is_name(NAME)
    assert hub.is_name("gpt2")
    for path in (str(tmp_path), f"{tmp_path}/none", "./here", "a/b/c", "tokenizer.model", "x/tokenizer.json"):
        assert not hub.is_name(path)


def test_the_cache_s_main_commit_is_taken(cache: Path) -> None:
    assert hub.local(NAME) == NAME
    other = put(cache, "aaa", main=False)
    assert hub.local(NAME) == str(other)
    folder = put(cache, "bbb")
    assert hub.local(NAME) == str(folder)
    assert hub.fetched(NAME) == str(folder)
    assert hub.notice(NAME) is None


@pytest.mark.parametrize("name", ["a--b", "a..b", f"{'x' * 100}/y"])
def test_a_name_that_the_hub_cannot_have_is_in_no_cache(cache: Path, name: str) -> None:
    assert hub.local(name) == name


def test_a_name_that_is_not_here_is_noticed_at_check_config(cache: Path) -> None:
    argv = [*BASE_FLAGS, "--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", NAME]
    (line,) = parse_config(argv, world_size=1).warnings[-1:]
    assert f"`hf download {NAME} tokenizer.json" in line
    assert "a run fetches it if there is a network, and is refused otherwise" in line


def test_it_is_fetched_where_there_is_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, allow_patterns: str(put(cache, "ccc"))
    )
    assert hub.fetched(NAME) == str(cache / "models--some-owner--some.tokenizer" / "snapshots" / "ccc")


def test_otherwise_it_is_refused_with_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(DataError, match=f"ConnectionError: no route.*run `hf download {NAME} tokenizer.json"):
        hub.fetched(NAME)
