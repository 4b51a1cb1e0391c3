"""reports: FLOPs, times and memory of a training, and monitors of a script's own values."""
