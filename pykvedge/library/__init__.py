"""Calls libkvedge from Python: caches, plans, stages from plugins, plain arrays."""
