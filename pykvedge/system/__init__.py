"""The operating system and the processor: memory, signals, thread locks, files, versions."""
