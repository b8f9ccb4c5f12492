"""Estimates the memory that a model, its pictures and its cache take on this machine (`kvedge fit`)."""
