"""Caches of computed results, in memory and in a folder, for example embeddings of images."""
