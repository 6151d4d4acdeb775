"""Checkpoints that each rank writes a part of, and that any number of ranks loads."""
