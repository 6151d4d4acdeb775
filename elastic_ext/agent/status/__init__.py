"""The status of a job on this node, from the files of its run directory."""
