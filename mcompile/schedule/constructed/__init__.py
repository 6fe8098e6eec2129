"""Constructed schedules: a good Trace for a task by analysis alone, with no search and no measurement."""

from mcompile.schedule.constructed.construct import construct

__all__ = ["construct"]
