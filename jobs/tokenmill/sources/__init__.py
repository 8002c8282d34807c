"""Sources of a corpus: list and fetch files of the Hub, of buckets, web servers and directories."""
