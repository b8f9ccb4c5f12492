"""Conversations: kvedge's sessions, and the attachment to a llama_cpp.Llama."""
