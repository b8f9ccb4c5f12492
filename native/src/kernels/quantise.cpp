#include "kernels/quantise.h"

#include <cstring>

namespace kvedge {

float put_half(float f, uint16_t & out) {
    kernels().from_f32(Type::f16, &f, &out, 1);
    kernels().to_f32(Type::f16, &out, &f, 1);
    return f;
}

namespace {

template <Type T> void write_blocks(const float * x, int32_t d, uint8_t * out) {
    for (int32_t i = 0; i < d; i += GROUP, out += block_bytes(T)) {
        Coded block;
        Traits<T>::quantise(x + i, GROUP, block);
        memcpy(out, &block.scale, 2);
        if (has_minimum(T)) {
            memcpy(out + 2, &block.minimum, 2);
        }
        Traits<T>::pack(block.codes, out + code_offset(T));
    }
}

template <Type T> void write_group(const float * x, int32_t n, int32_t d, uint8_t * out) {
    uint8_t * packed = out + 4 * (size_t) d;
    for (int32_t b = 0; b < d; b += GROUP) {
        uint8_t codes[GROUP][GROUP];  // [row][channel]
        for (int32_t i = 0; i < GROUP; i++) {
            float column[GROUP] = {};
            Coded channel;
            for (int32_t r = 0; r < n; r++) {
                column[r] = x[(size_t) r * (size_t) d + (size_t) (b + i)];
            }
            Traits<T>::quantise(column, n, channel);
            memcpy(out + 2 * (b + i), &channel.scale, 2);
            memcpy(out + 2 * (d + b + i), &channel.minimum, 2);
            for (int32_t r = 0; r < n; r++) {
                codes[r][i] = channel.codes[r];
            }
        }
        for (int32_t r = 0; r < n; r++) {
            Traits<T>::pack(codes[r], packed + ((size_t) r * (size_t) d + (size_t) b) / GROUP * code_bytes(T));
        }
    }
}

}  // namespace

void quantise_row(Type type, const float * x, int32_t d, uint8_t * out) {
    float rotated[MAX_HEAD_SIZE];
    if (is_rotated(type)) {
        memcpy(rotated, x, (size_t) d * sizeof(float));
        kernels().rotate({ rotated, (size_t) d }, 1, d, rotation(type, d));
        x = rotated;
    }
    with_type(type, [&](auto of) {
        if constexpr (is_quantised(of.value)) {
            write_blocks<of.value>(x, d, out);
        }
    });
}

void quantise_group(Type type, const float * x, int32_t n, int32_t d, uint8_t * out) {
    with_type(type, [&](auto of) {
        if constexpr (format(of.value).residual) {
            write_group<of.value>(x, n, d, out);
        }
    });
}

}  // namespace kvedge
