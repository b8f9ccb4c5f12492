"""Conversations: sessions of kvedge's own, and the attachment to a llama_cpp.Llama."""
