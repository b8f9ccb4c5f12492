"""Evaluation measures what compression costs: the same samples by every method, against the full cache.

tasks      samples, and those of the demo generator
datasets   samples from files: our JSONL, MileBench, LLaVA-Description, MM-Vet
metrics    perplexity, KL divergence, ROUGE-L, exact match, choices, bootstrap intervals
reader     a context in which one prompt is compressed in many ways
measure    one sample by all methods
records    the file of results, and going on with it
runner     all samples by all methods
table      results as Markdown, CSV or JSON
"""
