"""The parts of `proofs/mutants.py`: rules, sampling, which tests to run, and processes to run them in."""
