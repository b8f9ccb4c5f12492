"""The package meets this below it: kvedge.h by ctypes, the libraries, llama.cpp's set-up, memory, processor."""
