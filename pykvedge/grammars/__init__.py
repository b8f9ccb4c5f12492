"""Reads grammars for answers (GBNF, JSON schemas, regular expressions), which llguidance follows."""
