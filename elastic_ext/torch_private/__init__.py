"""What torch does not tell in public: one file per subsystem, each with a self-test at first use that
declines by name.
"""
