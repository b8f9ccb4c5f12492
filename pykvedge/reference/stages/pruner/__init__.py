"""Pruners: which rows of an image does the model read?"""
