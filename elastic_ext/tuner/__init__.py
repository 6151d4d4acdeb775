"""What a job should be doing, found out from what it does. Pure; only the model and the search need numpy."""
