"""Models and their inputs: GGUF files, the language model, the image encoder, pictures, chat templates."""
