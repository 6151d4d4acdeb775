"""All that this library uses of torch's private parts: one file per subsystem, each with a self-test at first use that
declines by name.
"""
