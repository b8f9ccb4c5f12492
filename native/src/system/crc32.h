// CRC-32 as in zlib, PNG and Ethernet (polynomial 0x04C11DB7, reflected), computed eight bytes at a time.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

// Returns the checksum of all bytes so far. so_far: the checksum of the bytes before `data`; 0 for the first bytes.
uint32_t crc32(uint32_t so_far, const void * data, size_t size);

}  // namespace kvedge
