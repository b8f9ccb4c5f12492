"""Decode policies: what happens to the cache as tokens are generated?"""
