// Slots: the places of a sequence's rows in device buffers. A device is a GPU, another machine, or the CPU. Meanwhile the host's store
// keeps everything about the rows except their memory. A layer has one of three layouts:
//   even     All KV heads of all layers have the same number of rows, and no row has a bias. A layer has one key tensor and one value
//            tensor; the rows of each KV head fill its first slots in token order.
//   regions  The layer's device has OWN_RAGGED (own.h). All rows of the layer share one list of slots; each KV head has a region of it.
//   groups   KV heads of similar length form a group; each KV head has a list of slots and a mask.
// If a decode policy drops a row, the next row takes the free slot.

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

// The sums of a prompt's attention that are wanted (AttentionSums in seen.h).
struct Summed {
    bool columns = false, squares = false, entropy = false;

    bool any() const { return columns || squares || entropy; }
    bool operator==(const Summed & x) const { return columns == x.columns && squares == x.squares && entropy == x.entropy; }
};

// Tokens that the next graphs will read.
struct Incoming {
    int32_t n;          // tokens of the next graph
    int32_t announced;  // tokens of the next graph and the announced graphs after it; slots are made for all these tokens
    int32_t window;     // number of last queries to keep
    Summed  summed;
    int32_t pending;  // pending rows of every KV head before these tokens
    int32_t parts;    // most pieces in which a layer's attention is added up
};

// The tensors of a group. Several groups may share one buffer.
struct Room {
    static constexpr size_t TENSORS = 4;

    std::shared_ptr<Tensors> held;
    ggml_tensor *            k    = nullptr;  // [d_k, slots, lists]
    ggml_tensor *            v    = nullptr;  // [d_v, slots, lists]
    // [slots, 1, lists] f16: bias of each row, or -inf. NULL: even, or regions in which no row has a bias or may be dropped
    ggml_tensor *            mask = nullptr;
    ggml_tensor *            pick = nullptr;  // [heads] i32: the group's KV heads; NULL: all KV heads in ascending order
    int32_t                  slots = 0;       // slots of each list
};

// Consecutive KV heads of a group whose rows are copied side by side for a ubatch of several tokens (several.cpp).
struct SidePart {
    size_t  first, heads;  // index of the first KV head in Group::heads, number of KV heads
    int32_t columns;  // columns of each KV head: new rows, older rows, padding
    size_t  at;       // index of the part's first column among the columns of its device
};

// KV heads of one layer whose rows lie in the same tensors.
struct Group : Room {
    std::vector<int32_t> heads;
    bool                 regions = false;  // all KV heads of the layer share one list; each has a region of it
    std::vector<int32_t> first;            // [head] slot of the first row
    std::vector<int32_t> used;             // [head] end of the slots that have or had a row
    // ordered: a decode policy may drop rows. Then order has the slots of each head's rows in token order, spare has free slots
    bool                              ordered = false;
    std::vector<std::vector<int32_t>> order, spare;
    std::vector<std::vector<float>>   biases;  // [head] biases of the rows that the layout began with; empty: all 0
    size_t                entry = 0, span = 0;  // position of the group's first head in the index input, and in the spans, of its device
    std::vector<SidePart> parts;                // set for a ubatch of several tokens
    bool                  stale = false;        // the mask on the device is out of date

    size_t  lists() const { return regions ? 1 : heads.size(); }
    int32_t n_rows(size_t i) const { return ordered ? (int32_t) order[i].size() : used[i] - first[i]; }
    int32_t most_used() const { return *std::max_element(used.begin(), used.end()); }
    // Returns the slots of the i-th head's rows in token order, counted from the first slot of the group's tensors.
    std::vector<int32_t> slots_of(size_t i) const;
    std::vector<float>   biases_of(size_t i) const;                       // returns the biases of a head's rows in token order
    int32_t              take_slot(size_t i);                             // takes and returns the slot of a head's next row
    void                 drop(size_t i, int32_t row);                     // removes a head's row, counted in token order
    std::vector<int32_t> starts(int32_t room) const;                      // returns regions with `room` free slots each, and their end
    void                 move_to(const std::vector<int32_t> & starts);    // renumbers the slots of moved regions
    void                 write_mask() const;                              // writes the mask of all rows to the device
    void                 fill() const;                                    // writes mask and pick to the device
};

// Free slots that every new region has at least. Regions that grow need new buffers and a new graph. 128 is the mean number of free
// slots in an even list, whose length is a multiple of 256.
constexpr int32_t REGION_ROOM = 128;

// The number of rows of each KV head in a new layout of a layer, and the rows' biases.
struct HeadRows {
    std::vector<int32_t>            n;       // [Hkv]
    std::vector<std::vector<float>> biases;  // [Hkv][n]; empty: no row of any layer has a bias
};

// The layout of one layer's rows on its device.
struct DeviceLayer {
    ggml_backend_dev_t device = nullptr;  // NULL: the host's store keeps the layer's rows
    std::vector<Group> groups;
    Tensors            order;             // holds `joined`
    ggml_tensor *      joined = nullptr;  // [Hkv] i32: position of each KV head in the concatenated groups; NULL: ascending
    size_t             on     = 0;        // index of the layer's device in Slots::devices
    size_t             query_at = 0, head_at = 0;  // query numbers and KV heads of the device's layers before this layer
};

// Totals over the layers of one device.
struct DeviceTotals {
    ggml_backend_dev_t  device = nullptr;
    std::vector<size_t> layers;
    size_t              entries = 0;  // entries of the index input for each token: 1 if even, else KV heads
    int32_t             most    = 0;  // most KV heads of a group
    size_t              spanned = 0;  // KV heads that have spans
    int64_t             span    = 2;  // i32 numbers of a span: first slot, number of rows, and a counter (0) for each query head
    size_t              query = 0, heads = 0;  // numbers of a token's queries; KV heads
    std::shared_ptr<Worker> worker;
};

struct Slots {
    // The types of rows on devices; rows of another type are converted on their way. dropping: a decode policy may drop rows.
    struct Form {
        Storage storage;
        bool    dropping;

        bool operator==(const Form & x) const { return storage.k == x.storage.k && storage.v == x.storage.v && dropping == x.dropping; }
    };

    Slots(const std::vector<LayerShape> & shapes, const std::vector<ggml_backend_dev_t> & places, const Form & form, uint64_t & stamps,
          std::shared_ptr<Workers> workers);

    // Copies the rows of `from` to the devices and frees their host memory. False: a device is out of memory (full_device), and
    // nothing changed. Throws std::bad_alloc.
    bool load(Store & from);
    bool fetch(Store & to);  // copies the rows back and frees the device memory. False: the host is out of memory, nothing changed
    bool make_plain();       // converts quantised rows to plain rows; false: as GraphRows::make_plain

    // Makes room for more rows of every KV head. False: a device is out of memory (full_device). Throws std::bad_alloc.
    bool grow(const Incoming & incoming);
    bool fits(const Incoming & incoming) const;  // whether every list has room for incoming.n rows; not meant for regions
    // Takes slots for n more rows of every KV head. Returns them as [device][entries * n]; even: [device][n].
    std::vector<std::vector<int64_t>> take(int32_t n);

    // Plans the groups of a layer for these rows, without their memory. False: the device is out of memory.
    bool lay_out(size_t layer, HeadRows && rows);
    // Returns tensors for `slots` slots of each list. Their memory comes later, from held->allocate().
    Room room_for(size_t layer, const Group & group, int32_t slots, const std::shared_ptr<Tensors> & held) const;
    void plan_devices();                    // sets `devices` from the groups of all layers

    // Returns the group of a KV head; at: the head's index in Group::heads. Throws std::logic_error if no group has the head.
    const Group &        group_of(size_t layer, int32_t head, size_t & at) const;
    std::vector<int32_t> places_of(size_t layer, int32_t head) const;  // Group::slots_of for the head in its group

    int32_t  visible(int32_t more = 0) const;  // slots that a graph over even rows reads after `more` more rows; uneven: 0
    int32_t  slots_with_memory() const { return visible(INT32_MAX / 2); }  // slots that have memory, if even
    int32_t  even_rows() const;                // rows of every KV head if even, else 0
    uint64_t bytes() const;                    // device memory in bytes. Does not allocate
    void     give_back_memory();                 // frees the work memory of kvedge's graphs
    bool     refuse(ggml_backend_dev_t device);  // notes that the device is out of memory; returns false
    void     change() { stamp = ++*stamps; }     // notes that a tensor was replaced: graphs built before are out of date

    const std::vector<LayerShape> * shapes;
    Form                            form;
    uint64_t *                      stamps;  // counter of the tensors of a cache
    std::shared_ptr<Workers>        workers;
    uint64_t                        stamp = 0;
    std::vector<DeviceLayer>        layers;
    std::vector<DeviceTotals>       devices;
    bool                            even      = true;
    int32_t                         n_threads = 1;
    std::string                     full_device;  // name of the device that was out of memory

  private:
    // A group that needs memory, its new number of slots, and the new starts of its regions.
    struct Unmade {
        size_t               layer;
        Group *              group;
        int32_t              slots;
        std::vector<int32_t> starts;
    };
    bool    make_plain_groups();
    bool    make_group(size_t layer, Group & group, int32_t slots);
    bool    make_groups(const std::vector<Unmade> & groups);
    bool    make_larger(const DeviceTotals & on, const std::vector<Unmade> & groups);
    bool    copy_by_graph(const DeviceTotals & on, const std::vector<Unmade> & groups, const std::vector<Room> & to) const;
    bool    make_order(size_t layer, const std::vector<int32_t> & heads);
    Group   placed(HeadRows & rows, const std::vector<int32_t> & heads, bool regions) const;
};

// Copies the last n rows of every KV head of `from` to the slots that were taken last.
void send_last(const Slots & slots, const Store & from, int32_t n);

// Returns whether all KV heads of the layers on devices hold the same number of rows in a store, and no row has a bias.
bool holds_even(const Store & store, const std::vector<ggml_backend_dev_t> & places);

}  // namespace kvedge
