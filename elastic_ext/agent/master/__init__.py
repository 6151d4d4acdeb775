"""The agent's side of its exchange with a master: the link, the messages, and the choice of a master."""
