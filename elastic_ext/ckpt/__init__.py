"""`elastic-ext ckpt`: looking at checkpoints and looking after them, without torch."""
