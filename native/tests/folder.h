// A temporary folder for a test.

#pragma once

#include "check.h"

#include <filesystem>
#include <random>
#include <string>

// Makes a new folder. The destructor checks that the folder is empty, and removes the folder.
struct Folder {
    Folder() : path(std::filesystem::temp_directory_path() / ("kvedge-spill-" + std::to_string(std::random_device()()))) {
        std::filesystem::create_directory(path);
    }
    ~Folder() {
        CHECK(std::filesystem::is_empty(path));
        std::filesystem::remove_all(path);
    }
    std::string           name() const { return path.u8string(); }
    std::filesystem::path path;
};
