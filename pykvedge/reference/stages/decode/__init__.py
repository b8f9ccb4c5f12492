"""Decode policies say what happens to the cache while tokens are generated."""
