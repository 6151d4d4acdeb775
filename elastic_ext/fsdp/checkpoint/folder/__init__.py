"""A job's folder of checkpoints: who holds it, what exists, what is kept and what is removed."""
