"""What training should be doing, as one value: its file, its history, and how all ranks agree on it."""
