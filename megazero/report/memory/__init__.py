"""`megazero memory-report`: what the memory of each rank holds, measured or planned."""
