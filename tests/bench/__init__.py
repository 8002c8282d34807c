"""`make bench`: tokenmill beside what people use instead, whole processes on one CPU, as ratios in one run."""
