"""What comes from outside: listing and fetching sources, decompressing and reading records."""
