"""What agents, people and the master say to one another, over gRPC: master.proto, and the stubs made from it.

The stubs are made by `make stubs` with the oldest compiler whose code the oldest supported protobuf loads; newer ones
load it too.
"""
