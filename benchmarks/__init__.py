"""What speed and memory claims rest on: each module here that defines ``main`` is one benchmark."""
