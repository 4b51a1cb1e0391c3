"""observe: metrics of a run, monitors that show them, and measurements of time, memory and the machine."""
