"""Allocators: how many KV pairs does each layer and KV head keep?"""
