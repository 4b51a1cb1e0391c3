"""fault_matrix: faults put into small trainings on purpose, and what the guards make of them.

`faults.py` breaks things, `runs.py` trains with them, `cases.py` lists what is broken where
and what must come of it, and `__main__.py` is the command.
"""
