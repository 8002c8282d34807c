"""The formats of records: `transforms` has the functions that make them."""
