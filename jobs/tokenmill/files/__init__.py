"""Files on shared storage: open them without following links, publish them atomically, hash them, explain errors.

All other packages use this one for an output directory and for records. It imports `machine` and `errors` only.
"""
