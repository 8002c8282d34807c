"""What all rooms use, and what knows nothing about tokens, stages or training.

files       files on shared storage: atomic publishing, leases, hashes, errors that name the file
machine     cores and memory of this machine or pod
printing    the form of all that is printed: texts of records, counts, bytes, durations, shares, tables
redaction   secrets leave no trace in output
typed_json  JSON -> records, in any thread
"""
