"""observe: what a run tells: metrics, monitors, and measurements of time, memory and the machine."""
