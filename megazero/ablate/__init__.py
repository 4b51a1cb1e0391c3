"""ablate: one command that trains a folder of configurations and compares what each of them learned.

`study.py` reads the folder, `lengths.py` lengthens or shortens its trainings, `corpus.py` makes the
quickstart's corpora, `trial.py` is one configuration with one seed, `runs.py` trains what is not trained yet,
`progress.py` shows how far it is. `results.py` reads the metrics, `sizes.py` counts parameters, `table.py`
and `picture.py` show both. `commands/ablate.py` is the command.
"""
