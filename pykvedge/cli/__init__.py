"""The command line has one thin command per file; program.py puts them together."""
