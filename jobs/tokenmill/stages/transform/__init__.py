"""Transforms: functions that take a record and return a record, or None to drop it."""
