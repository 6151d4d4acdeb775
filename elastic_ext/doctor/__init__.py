"""What is wrong with a machine, and with pairs of nodes: looked at, judged, and told in words."""
