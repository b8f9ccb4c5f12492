"""KIVI in 2 bits."""

from pykvedge.reference.kvtypes import kivi4

TYPE = kivi4.in_bits(2)
