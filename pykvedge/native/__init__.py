"""What the package meets below it: kvedge.h by ctypes, the libraries, llama.cpp's set-up, memory and processor."""
