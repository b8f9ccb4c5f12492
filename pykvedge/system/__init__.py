"""The operating system and the processor: memory, signals, locks of threads, files, versions."""
