"""What an agent exchanges with a master, and which master that is."""
