// A session file replaces an older file completely or not at all, also if its name is not ASCII.

#include "check.h"
#include "system/file.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

namespace fs = std::filesystem;
using namespace kvedge;

namespace {

const fs::path folder =
    fs::temp_directory_path() / fs::u8path(u8"kvedge-Größe-会話-\U0001F4AC-" + std::to_string(std::random_device{}()));
const fs::path file = folder / fs::u8path(u8"дом é.kvs");

void check_holds(const std::string & text) {
    std::ifstream in(file, std::ios::binary);
    CHECK(std::string(std::istreambuf_iterator<char>(in), {}) == text);
    FileReader   reader;
    kvedge_error err{};
    std::string  read(text.size(), ' ');
    CHECK(reader.open(file.u8string().c_str(), &err) == KVEDGE_OK);
    CHECK(reader.size() == text.size() && reader.read(read.data(), text.size()) && read == text);
}

std::ptrdiff_t entries() { return std::distance(fs::directory_iterator(folder), fs::directory_iterator()); }

kvedge_status write(const std::string & text, bool commit) {
    kvedge_error  err{};
    FileWriter    writer;
    kvedge_status status = writer.open(file.u8string().c_str(), &err);
    if (status == KVEDGE_OK) {
        writer.write(text.data(), text.size());
        CHECK(entries() >= 1);
        status = commit ? writer.commit(&err) : KVEDGE_OK;
    }
    return status;
}

// The content has line ends and zero bytes, which must be written unchanged.
const std::string first = std::string("one\r\ntwo\n\0three\x1a", 16) + "four", second(100000, '\n');

void test_takes_the_place() {
    CHECK(write(first, true) == KVEDGE_OK);
    check_holds(first);
    CHECK(write(second, true) == KVEDGE_OK);
    check_holds(second);
    CHECK(write(first, false) == KVEDGE_OK);  // a writer without commit() removes its temporary file
    check_holds(second);
    CHECK(entries() == 1);
}

void test_refused() {
    kvedge_error err{};
    for (const fs::path & path : { folder, folder / "nowhere" / "file.kvs" }) {
        FileWriter writer;
        CHECK(writer.open(path.u8string().c_str(), &err) == KVEDGE_E_FILE);
        CHECK(strstr(err.message, path.u8string().c_str()));
    }
    for (const fs::path & path : { folder, folder / fs::u8path(u8"nichts-là.kvs") }) {
        FileReader reader;
        CHECK(reader.open(path.u8string().c_str(), &err) == KVEDGE_E_FILE);
        CHECK(strstr(err.message, path.u8string().c_str()));
    }
    CHECK(entries() == 1);
}

// If a folder takes the file's name between open() and commit(), the error names the reason, and no temporary file stays.
void test_place_lost() {
    kvedge_error err{};
    {
        FileWriter writer;
        CHECK(writer.open(file.u8string().c_str(), &err) == KVEDGE_OK);
        writer.write(first.data(), first.size());
        fs::remove(file);
        fs::create_directory(file);
        CHECK(writer.commit(&err) == KVEDGE_E_FILE);
        CHECK(strstr(err.message, "cannot be written: ") && strstr(err.message, "an older file of this name is unchanged"));
    }
    CHECK(fs::is_directory(file) && entries() == 1);
}

}  // namespace

int main() {
    fs::create_directory(folder);
    test_takes_the_place();
    test_refused();
    test_place_lost();
    fs::remove_all(folder);
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
