"""Optimizers, schedules and scalers as they take part in steps and in changes of the config."""
