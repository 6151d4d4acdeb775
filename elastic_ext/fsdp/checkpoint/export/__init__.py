"""Checkpoints as other tools read them, and folders of other tools as checkpoints."""
