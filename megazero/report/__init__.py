"""report: what a run's folder holds, and one page of HTML that shows it."""
