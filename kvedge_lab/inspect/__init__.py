"""What a KV cache looks like, and what a method keeps of it: figures, as `kvedge inspect` draws them."""
