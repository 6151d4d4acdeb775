"""How a checkpoint is loaded: found, read and verified, and put into a model."""
