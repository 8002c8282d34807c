"""The record of a run's data, for programs that `tokenmill compare` reads."""

from tokenmill.samples.run_record import write_record

__all__ = ["write_record"]
