"""Moves between ranks: the plan of a model changed while it is trained, and ranks that come and leave."""
