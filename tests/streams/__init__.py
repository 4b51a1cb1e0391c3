"""The order of copies, of computing and of the host's own work: recorded, and judged by happens-before."""
