"""ablate: train a folder of configurations, and compare what each of them learned.

`study.py` reads the folder, `lengths.py` lengthens or shortens trainings, `corpus.py` makes the quickstart's
corpora, `trial.py` is a configuration with a seed, `runs.py` trains the trials that are not finished, and
`progress.py` shows their progress. `results.py` reads the metrics, `sizes.py` counts parameters, `table.py`
and `picture.py` show both. The command is `commands/ablate.py`.
"""
