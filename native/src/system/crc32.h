// CRC-32 as zlib, PNG and Ethernet have it (polynomial 0x04C11DB7, reflected), eight bytes at a time.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

// Goes on from the checksum of what came before; 0 begins.
uint32_t crc32(uint32_t so_far, const void * data, size_t size);

}  // namespace kvedge
