// A sequence as bytes: tokens, blocks with every head's rows, and what is pending.

#pragma once

#include "session/file.h"
#include "store/sequence.h"

#include <memory>

namespace kvedge {

// Whether scores of an unfinished prompt are held, which are not written.
bool observes(const Sequence & seq);

void write_sequence(const Sequence & seq, Sink & out);

// NULL: the bytes are no sequence of these shapes. Throws std::bad_alloc; no more memory is asked for than the file can fill, some spare rows apart.
std::unique_ptr<Sequence> read_sequence(FileReader & in, const std::vector<LayerShape> & shapes, const Storage & storage);

}  // namespace kvedge
