"""Elastic data: batches whose sizes, workers and ranks change in the middle of an epoch, no sample lost or repeated."""
