"""Tuning: search spaces derived from tasks, a learned cost model, evolutionary search, measuring and records."""
