"""Reducers: what becomes of the evicted KV pairs?"""
