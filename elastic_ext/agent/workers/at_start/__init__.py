"""The sitecustomize that Python runs in a worker before its script: the agent puts this folder first in PYTHONPATH."""
