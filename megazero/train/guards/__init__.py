"""guards: checks of each step of a run, and the actions that follow from them.

The loop calls `guard.py`. `spikes.py` finds values far above the usual, `rerun.py` computes a step again,
`facts.py` gathers the facts of a step for a report, and `incidents.py` writes reports and reads them.
"""
