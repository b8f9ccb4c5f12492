"""The command line: one thin command per file; program.py collects them."""
