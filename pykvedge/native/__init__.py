"""The package calls native code here: kvedge.h by ctypes, the libraries, llama.cpp's set-up."""
