"""Scorers say how much a KV pair matters."""
