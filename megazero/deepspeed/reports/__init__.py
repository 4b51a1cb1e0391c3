"""reports: what a training takes and says: FLOPs, times, memory, and monitors of a script's own values."""
