"""A step commits or it never happened: the trainer, its session, and what happens at boundaries."""
