"""Who trains: which nodes and workers a job runs on, and how that changes while its processes live."""
