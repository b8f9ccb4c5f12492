#include "system/crc32.h"

#include <array>

namespace kvedge {

namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Returns tables: [k][b] is the change of the checksum by a byte b that k zero bytes follow.
constexpr Tables make_tables() {
    Tables t{};
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t c = b;
        for (int bit = 0; bit < 8; bit++) {
            c = (c >> 1) ^ (c & 1 ? 0xEDB88320u : 0u);
        }
        t[0][b] = c;
    }
    for (size_t k = 1; k < 8; k++) {
        for (size_t b = 0; b < 256; b++) {
            t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xFF];
        }
    }
    return t;
}

constexpr Tables tables = make_tables();

}  // namespace

uint32_t crc32(uint32_t so_far, const void * data, size_t size) {
    const uint8_t * p = (const uint8_t *) data;
    uint32_t        c = ~so_far;
    for (; size >= 8; p += 8, size -= 8) {
        c ^= (uint32_t) p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24;
        c = tables[7][c & 0xFF] ^ tables[6][c >> 8 & 0xFF] ^ tables[5][c >> 16 & 0xFF] ^ tables[4][c >> 24] ^
            tables[3][p[4]] ^ tables[2][p[5]] ^ tables[1][p[6]] ^ tables[0][p[7]];
    }
    for (; size > 0; p++, size--) {
        c = tables[0][(c ^ *p) & 0xFF] ^ c >> 8;
    }
    return ~c;
}

}  // namespace kvedge
