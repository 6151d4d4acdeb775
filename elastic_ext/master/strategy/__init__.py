"""What a job should be doing, found out from what it does: pure, and without torch."""
