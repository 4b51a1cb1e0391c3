"""optimizers: torch's and DeepSpeed's optimizers over shards (`optimizer.py`), and their update rules."""
