"""The parts of `benchmarks/mutants.py`: rules, sampling, which tests to run, and processes to run them in."""
