"""The tuner: it measures a job's steps and decides on faster values of the job's config keys. Pure.

Only performance_model.py and search.py need numpy.
"""
