"""How ranks and nodes tell each other things: collectives on plain numbers, boards in a store, heartbeats and
processes.
"""
