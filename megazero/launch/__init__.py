"""Starts the ranks of a script on the hosts of a cluster, and ends them together: `megazero launch`."""
