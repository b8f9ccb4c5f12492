"""Reducers say what becomes of the evicted KV pairs."""
