"""The files of a checkpoint: shard files, metadata, and the bytes of tensors."""
