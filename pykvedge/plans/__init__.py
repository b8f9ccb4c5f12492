"""Plans say what to keep of a prompt: stages, presets, profiles and plugins."""
