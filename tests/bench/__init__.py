"""`make bench`: compares tokenmill with the usual alternatives, as complete processes on one CPU, in ratios."""
