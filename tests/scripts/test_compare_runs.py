"""The table of fine-tunings with several seeds."""

from __future__ import annotations

import json

from scripts.compare_runs import main


def test_the_table_shows_every_seed_and_the_spread(tmp_path, capsys):
    for start, base in (("pretrained", 0.5), ("scratch", 0.25)):
        for seed, more in (("1", 0.0), ("2", 0.02)):
            run = tmp_path / f"{start}-{seed}"
            run.mkdir()
            records = [
                {"split": "validation", "accuracy": 0.9, "macro_f1": 0.9},
                {"split": "test", "accuracy": base + more, "macro_f1": base / 2},
            ]
            (run / "metrics.eval.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert main([str(tmp_path), "1", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| pretrained | 50.00, 52.00 | 51.00 ± 1.41 | 25.00 ± 0.00 |",
        "| from scratch | 25.00, 27.00 | 26.00 ± 1.41 | 12.50 ± 0.00 |",
    ]


def test_what_is_missing_is_said(tmp_path, capsys):
    assert main([str(tmp_path), "1"]) == 1
    assert "must have been tested, but is not" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
