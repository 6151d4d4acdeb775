"""Mistakes that a training loop can make, each with the sentence that it gets; and loops of peers, which make none."""
