// Where the rows of one sequence lie in buffers of their layers' devices: a GPU, another machine, or the CPU. The store keeps all
// it knows of them meanwhile, but their memory.
//
// While all heads of all layers have as many rows they are even: one tensor of keys and one of values for a layer, every head
// with its rows in the first of its slots, in token order. Else, and where rows have biases, a device that has attention over
// heads of different lengths has all rows of a layer in one list of slots, each head's in a region of it; elsewhere heads of
// similar length share a group, each with a list of slots and a mask. Where a decode policy drops rows, the next one takes the slot.

#pragma once

#include "device/tensors.h"
#include "rows/rows.h"
#include "store/store.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvedge {

// What is added up of a prompt's attention.
struct Summed {
    bool columns = false, squares = false, entropy = false;

    bool any() const { return columns || squares || entropy; }
    bool operator==(const Summed & x) const { return columns == x.columns && squares == x.squares && entropy == x.entropy; }
};

// Tokens that are about to be read.
struct Incoming {
    int32_t n;       // in the next graph
    int32_t follow;  // in this one and those after it: slots are made for all of them
    int32_t window;  // last queries that are kept
    Summed  summed;
    int32_t pending;  // rows of every head that are pending already
    int32_t parts;    // pieces in which a layer's attention may be added up
};

// Tensors of a group, which may share a buffer with those of other layers.
struct Room {
    static constexpr size_t TENSORS = 4;

    std::shared_ptr<Tensors> held;
    ggml_tensor *            k    = nullptr;  // [d_k, slots, lists]
    ggml_tensor *            v    = nullptr;  // [d_v, slots, lists]
    // where heads are uneven: [slots, 1, heads] f16, a row's bias, or -inf; with regions [slots], or NULL: all 0
    ggml_tensor *            mask = nullptr;
    ggml_tensor *            pick = nullptr;  // [heads] i32, where they are not all, in their own order
    int32_t                  slots = 0;       // of each list
};

// Heads, one after the other, whose rows are laid side by side while several tokens attend to them.
struct SidePart {
    size_t  first, heads;
    int32_t columns;  // of each head: the new rows, its older ones, and padding
    size_t  at;       // of its first column among those of its device
};

// Heads whose rows lie in the same tensors.
struct Group : Room {
    std::vector<int32_t> heads;
    bool                 regions = false;  // all heads of the layer share one list, and each has a region of it
    std::vector<int32_t> first;            // of each head: slot of its first row
    std::vector<int32_t> used;             // likewise: end of the slots that have or had a row
    // where rows are dropped: the slots of each head's rows, in token order, and those that are free again
    bool                              ordered = false;
    std::vector<std::vector<int32_t>> order, spare;
    std::vector<std::vector<float>>   biases;  // of the rows with which each head came; empty: all 0
    size_t                entry = 0, span = 0;  // of its first head in the index input of its device, and among the spans
    std::vector<SidePart> parts;                // while several tokens are read
    bool                  stale = false;        // the mask does not show all rows yet

    size_t  lists() const { return regions ? 1 : heads.size(); }
    int32_t n_rows(size_t i) const { return ordered ? (int32_t) order[i].size() : used[i] - first[i]; }
    int32_t most_used() const { return *std::max_element(used.begin(), used.end()); }
    // The slots of a head's rows in token order, from the first slot of all lists on.
    std::vector<int32_t> slots_of(size_t i) const;
    std::vector<float>   biases_of(size_t i) const;                       // of a head's rows in token order
    int32_t              take_slot(size_t i);                             // of a head's next row
    void                 drop(size_t i, int32_t row);                     // a head's row, in token order
    std::vector<int32_t> starts(int32_t room) const;                      // of regions with room for more rows, and their end
    void                 move_to(const std::vector<int32_t> & starts);    // regions
    void                 write_mask() const;                              // what every head may look at so far, to the device
    void                 fill() const;                                    // what the host knows, into tensors that have memory
};

// Tokens that a region always has room for: a layer whose regions grow gets new buffers, and a graph is made anew. As many as a list
// of even rows has on average, which is rounded up to 256.
constexpr int32_t REGION_ROOM = 128;

// The rows that the heads of a layer are about to hold.
struct HeadRows {
    std::vector<int32_t>            n;       // [Hkv]
    std::vector<std::vector<float>> biases;  // [Hkv][n]; empty: no row of any layer has one
};

struct DeviceLayer {
    ggml_backend_dev_t device = nullptr;  // NULL: its rows stay with the store
    std::vector<Group> groups;
    Tensors            order;
    ggml_tensor *      joined = nullptr;  // [Hkv] i32: where each head lies, when groups follow each other; NULL: in their order
    size_t             on     = 0;        // its device, in Slots::devices
    size_t             query_at = 0, head_at = 0;  // its place on the device: numbers of a query, KV heads
};

// What the layers of one device have together.
struct LayersOn {
    ggml_backend_dev_t  device = nullptr;
    std::vector<size_t> layers;
    size_t              entries = 0;  // of the index input, for a token
    int32_t             most    = 0;  // heads of a group
    size_t              spanned = 0;  // heads that have spans
    int64_t             span    = 2;  // numbers of a span: first slot, rows, and of each query head one that is 0
    size_t              query = 0, heads = 0;  // numbers of a token's query, KV heads
    std::shared_ptr<Worker> worker;
};

struct Slots {
    // How rows lie on devices: those of the store are converted where their types differ. dropping: single ones may go.
    struct Form {
        Storage storage;
        bool    dropping;

        bool operator==(const Form & x) const { return storage.k == x.storage.k && storage.v == x.storage.v && dropping == x.dropping; }
    };

    Slots(const std::vector<LayerShape> & shapes, const std::vector<ggml_backend_dev_t> & places, const Form & form, uint64_t & stamps,
          std::shared_ptr<Workers> workers);

    // The rows of `from` go to the devices, and its memory is given back. False: a device has no memory (full_device), and
    // nothing has changed. Throws std::bad_alloc.
    bool load(Store & from);
    bool fetch(Store & to);  // and back; what is on the devices is freed. False: no memory, and nothing has changed
    bool make_plain();       // GraphRows::make_plain

    // Room for more rows of every head. False: a device has no memory (full_device). Throws std::bad_alloc.
    bool grow(const Incoming & incoming);
    bool fits(const Incoming & incoming) const;
    // Slots for n more rows of every head, [device][entries * n]; where rows are even [device][n].
    std::vector<std::vector<int64_t>> take(int32_t n);

    // Where the rows of a layer's heads are about to lie: its groups, without memory. False: no memory.
    bool lay_out(size_t layer, HeadRows && rows);
    // For so many slots, in memory that `held` is yet to be given.
    Room room_for(size_t layer, const Group & group, int32_t slots, const std::shared_ptr<Tensors> & held) const;
    void plan_devices();                    // when the groups of all layers are known

    // The places of a head's rows in its layer's tensors, in token order: list * slots + slot; and of which group.
    const Group &        group_of(size_t layer, int32_t head, size_t & at) const;
    std::vector<int32_t> places_of(size_t layer, int32_t head) const;

    int32_t  visible(int32_t more = 0) const;  // slots that a graph over even rows looks at, with so many more rows
    int32_t  shown() const { return visible(INT32_MAX / 2); }  // the most that there is memory for
    int32_t  even_rows() const;                // rows of every head, where they are even
    uint64_t bytes() const;                    // takes no memory
    void     give_back_memory();                 // that graphs of ours left
    bool     refuse(ggml_backend_dev_t device);  // it had no memory; false
    void     change() { stamp = ++*stamps; }     // a tensor is another one: graphs that were built are not the same

    const std::vector<LayerShape> * shapes;
    Form                            form;
    uint64_t *                      stamps;  // of the tensors of a cache that were made
    std::shared_ptr<Workers>        workers;
    uint64_t                        stamp = 0;
    std::vector<DeviceLayer>        layers;
    std::vector<LayersOn>           devices;
    bool                            even      = true;
    int32_t                         n_threads = 1;
    std::string                     full_device;  // the one that had no memory

  private:
    // A group that has too little memory or none, how many slots it is to have, and where its regions are to begin.
    struct Unmade {
        size_t               layer;
        Group *              group;
        int32_t              slots;
        std::vector<int32_t> starts;
    };
    bool    make_plain_groups();
    bool    make_group(size_t layer, Group & group, int32_t slots);
    bool    make_groups(const std::vector<Unmade> & groups);
    bool    make_larger(const LayersOn & on, const std::vector<Unmade> & groups);
    bool    copy_by_graph(const LayersOn & on, const std::vector<Unmade> & groups, const std::vector<Room> & to) const;
    bool    make_order(size_t layer, const std::vector<int32_t> & heads);
    Group   placed(HeadRows & rows, const std::vector<int32_t> & heads, bool regions) const;
};

// The last n rows of every head in `from`, to the slots that were taken last.
void send_last(const Slots & slots, const Store & from, int32_t n);

// Whether all heads of the layers on devices hold as many rows in a store, none of them with a bias.
bool holds_even(const Store & store, const std::vector<ggml_backend_dev_t> & places);

}  // namespace kvedge
