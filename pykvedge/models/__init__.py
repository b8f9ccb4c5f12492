"""Models and what they are given: GGUF files, the language model, the image encoder, pictures, chat templates."""
