"""The engine: schedule, run, settle."""
