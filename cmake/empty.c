// The source of a CPU variant that is not wanted (Llama.cmake).
