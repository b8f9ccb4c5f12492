"""Scorers: how much does a KV pair matter?"""
