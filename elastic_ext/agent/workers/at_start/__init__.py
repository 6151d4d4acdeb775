"""What runs first in a worker's Python, before its script: the folder is put in front of PYTHONPATH."""
