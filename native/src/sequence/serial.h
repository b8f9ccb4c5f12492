// Writes and reads a sequence as bytes: tokens, blocks with the rows of every head, and which blocks are pending.

#pragma once

#include "sequence/sequence.h"
#include "system/file.h"

#include <memory>

namespace kvedge {

// Writes a sequence without its observations.
void write_sequence(const Sequence & seq, Sink & out);

// Returns the sequence; NULL: the bytes are no sequence of these shapes. Allocates no more than the file can fill, plus some spare
// rows. Throws std::bad_alloc.
std::unique_ptr<Sequence> read_sequence(Reader & in, const std::vector<LayerShape> & shapes, const Storage & storage);
// Write and read an uncompressed sequence with its observations. NULL: invalid bytes. Throws std::bad_alloc.
void write_whole(const Sequence & seq, Sink & out);
std::unique_ptr<Sequence> read_whole(Reader & in, const std::vector<LayerShape> & shapes, const Storage & storage);

}  // namespace kvedge
