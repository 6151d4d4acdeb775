"""What a step does to gradients: weighing, sharing, clipping, and what their noise says."""
