"""plan: shows what a launch would do, without launching it. So far: how long a pipeline schedule takes."""
