"""Prompts read into a llama_context whose KV memory libkvedge owns, compressed, and measured."""
