"""Measures speed and memory of methods beside stock llama.cpp, in one run."""
