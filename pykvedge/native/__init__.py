"""Calls native code: kvedge.h by ctypes, the shared libraries, the set-up of llama.cpp."""
