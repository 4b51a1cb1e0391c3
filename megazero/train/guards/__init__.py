"""guards: what a run checks about itself at each step, and what it does about what it finds.

`guard.py` is what the loop calls. `spikes.py` says what is far above the usual, `rerun.py` computes a step
again, `facts.py` gathers what a report tells of a step, and `incidents.py` writes reports and reads them.
"""
