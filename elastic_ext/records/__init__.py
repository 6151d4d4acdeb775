"""What is written down: whole files, typed JSON records, the run directory, metrics and text."""
