"""Speed and memory of methods, beside stock llama.cpp, in one run.

matrix     what is measured: models, prompts, variants
machine    what the machine is, can read per second, and spends
measure    one variant reading one prompt once
runner     all of it, in turns
table      medians and spread, as Markdown, CSV, JSON
plot       the same as a picture
"""
