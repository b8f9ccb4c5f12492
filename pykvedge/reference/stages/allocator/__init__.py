"""Allocators say how many KV pairs each layer and KV head keeps."""
