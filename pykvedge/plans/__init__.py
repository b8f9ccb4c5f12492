"""What to keep of a prompt: stages, plans, presets, profiles and plugins, with their definitions in NumPy."""
