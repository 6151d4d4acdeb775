"""What a model takes of its device's memory: measured, worked out beside training, and predicted."""
