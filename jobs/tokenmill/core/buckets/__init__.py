"""Objects in buckets: `stores` finds credentials and opens a bucket, `client` lists and reads its objects.

obstore is the one client of all providers. Of the clients that were measured, it needs the least CPU time and memory
for a range of an object, and it writes under conditions (docs/internals/benchmarks.md). The providers' own libraries
find the credentials, so every form that their tools accept works here too.

A process that has used obstore must not continue in a fork: its threads do not exist there, and a request never ends.
"""
