"""plan: what would a launch do, without launching it. So far: how long a pipeline schedule takes."""
