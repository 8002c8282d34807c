"""Files on shared storage: open them without following links, publish them atomically, hash them, explain errors.

`pickles` reads a pickle of an unknown origin as data.

All other packages use this one for an output directory and for records. It imports only the layers below it.
"""
