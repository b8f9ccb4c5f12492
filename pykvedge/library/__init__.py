"""libkvedge as Python calls it: a context's cache, plans, stages of one's own, arrays."""
