"""Answers that follow a grammar: GBNF, JSON schemas and regular expressions, by llguidance."""
