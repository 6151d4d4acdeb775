"""The node's half of a job: an agent starts the workers of one machine, watches them, and explains what became of them.

It works without a master. Agent and workers meet in the files of the run directory, and in a folder in memory that
goes with the agent.
"""
