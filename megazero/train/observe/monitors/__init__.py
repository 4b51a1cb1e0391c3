"""Monitors, which show or record a run's metrics: one file per destination.

`base.py` has the base class and a composite; `console.py` prints lines and a progress bar, `jsonl.py` writes
one object per iteration, `csv_file.py` one file per metric; `tensorboard.py` draws charts, as do the trackers
in `train/news`. `build.py` builds those that a run asks for.
"""
