"""elastic-ext report: where the time of a training went, on one page that needs nothing else."""
