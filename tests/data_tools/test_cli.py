from __future__ import annotations

import os
import threading

import pytest

from megazero.data_tools import cli
from megazero.errors import ConfigError, DataError


def test_exit_status_tells_what_happened(capsys):
    def raising(error):
        def tool(args):
            raise error

        return tool

    assert cli.run(lambda args: None, None) == 0
    assert cli.run(raising(DataError("bad data")), None) == 1
    assert cli.run(raising(ConfigError("bad flag")), None) == 2
    assert cli.run(raising(PermissionError(13, "Permission denied", "/x")), None) == 1
    assert cli.run(raising(KeyboardInterrupt()), None) == 130
    shown = capsys.readouterr().err.splitlines()
    assert shown[:2] == ["error: bad data", "error: bad flag"]
    assert "/x" in shown[2]


def test_tools_run_on_threads_too():
    results = []
    thread = threading.Thread(target=lambda: results.append(cli.run(lambda args: None, None)))
    thread.start()
    thread.join()
    assert results == [0]


def test_inputs_are_expanded_in_order(tmp_path):
    for name in ("b", "a", "[x]"):
        (tmp_path / name).touch()
    paths = cli.expand_inputs([str(tmp_path / "[x]"), str(tmp_path / "?")])
    assert [os.path.basename(path) for path in paths] == ["[x]", "a", "b"]
    with pytest.raises(DataError, match="is a directory"):
        cli.expand_inputs([str(tmp_path)])
