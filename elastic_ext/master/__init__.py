"""The master: a job's memory and its voice. Nothing here imports torch, and training goes on without it."""
