"""remote: a run's folder on object storage, which ranks see as a local folder: its mirror."""
