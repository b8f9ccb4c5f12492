"""Pruners say which rows of an image the model reads."""
