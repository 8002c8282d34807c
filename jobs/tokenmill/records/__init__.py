"""Records of text in files.

suffixes            codec and format by the name of a file
unexpected_content  content that differs from what the name declares
compression         a file -> decompressed bytes in blocks
blocks              these bytes -> blocks of complete records (`json_cutter` cuts JSON arrays)
parse               a block -> records, and the reasons of bad ones
readers             a file -> its records, in one process
"""
