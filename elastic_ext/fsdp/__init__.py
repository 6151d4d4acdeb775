"""Sharded state: where tensors lie, and how they get from there to where they are wanted."""
