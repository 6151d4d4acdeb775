"""The workers of a node: started, watched, and judged when they hang or are slow."""
