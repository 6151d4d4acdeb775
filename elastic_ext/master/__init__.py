"""The master of a job: it keeps nodes, configs, events and metrics, and runs the tuner. Training goes on without it.

Nothing here imports torch.
"""
