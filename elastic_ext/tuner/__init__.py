"""The tuner: it is told how long a job's steps take, and decides on faster values of the job's config keys.

All of it is *pure*: no clock, no file and no network is read, though objects have state, and the same calls give the
same decisions. Only performance_model.py and search.py need numpy.
"""
