"""Figures of a KV cache, and of what a method keeps of it (`kvedge inspect`)."""
