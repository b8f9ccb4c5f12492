// A sequence as bytes: tokens, blocks with every head's rows, and what is pending.

#pragma once

#include "sequence/sequence.h"
#include "system/file.h"

#include <memory>

namespace kvedge {

// What was observed of an unfinished prompt is not written.
void write_sequence(const Sequence & seq, Sink & out);

// NULL: the bytes are no sequence of these shapes. Throws std::bad_alloc; no more memory is asked for than the file can fill, some spare rows apart.
std::unique_ptr<Sequence> read_sequence(Reader & in, const std::vector<LayerShape> & shapes, const Storage & storage);

// A sequence of which nothing was compressed, with what was observed of it. NULL and errors: as read_sequence has them.
void write_whole(const Sequence & seq, Sink & out);
std::unique_ptr<Sequence> read_whole(Reader & in, const std::vector<LayerShape> & shapes, const Storage & storage);

}  // namespace kvedge
