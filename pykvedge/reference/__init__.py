"""Every method in NumPy, as its paper states it: the definitions that native code is compared with."""
