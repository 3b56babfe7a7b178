"""The command line: a thin skin over the library. The only part that prints."""
