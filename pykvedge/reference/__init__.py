"""Every method in NumPy, as its paper states it. Tests compare the native code with these definitions."""
