"""How a checkpoint is saved: collected, staged, written by each rank, and committed."""
