"""Reads prompts into a llama_context whose KV memory belongs to libkvedge, compresses them, and measures the cost."""
