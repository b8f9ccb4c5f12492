// Unnamed files, and the thread that writes them, which may end at any time.

#include "folder.h"
#include "system/spill.h"
#include "system/unnamed_file.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

using namespace kvedge;

namespace {

std::mt19937 rng(11);

int32_t below(int32_t n) { return std::uniform_int_distribution<int32_t>(0, n - 1)(rng); }

std::shared_ptr<Pages> filled(size_t size) {
    auto       pages = std::make_shared<Pages>(Pages::take(size));
    const auto first = (size_t) rng();
    for (size_t i = 0; i < pages->size(); i += 61) {
        pages->data()[i] = (uint8_t) (first + i * 7);
    }
    return pages;
}

bool same(const Pages & a, const Pages & b) { return a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data()); }

void files() {
    Folder folder;
    Pages  first, second;
    {
        const auto  a = filled(100), b = filled(3u << 20);
        UnnamedFile file;
        CHECK(file.open(folder.name()) && file.problem().empty());
        const uint64_t at = (a->size() + UnnamedFile::ALIGNMENT - 1) / UnnamedFile::ALIGNMENT * UnnamedFile::ALIGNMENT;
        CHECK(file.write(0, a->data(), a->size()) && file.write(at, b->data(), b->size()));
        CHECK(file.map(0, a->size(), first) && file.map(at, b->size(), second));
        CHECK(first.mapped() && same(*a, first) && same(*b, second));
        second.cool();
        CHECK(same(*b, second));
    }
    CHECK(first.size() > 0 && second.data()[0] == second.data()[0]);  // mapped pages outlive the file's handle
    const Pages copy = second;
    CHECK(!copy.mapped() && same(copy, second));

    kvedge_error err{};
    CHECK(check_folder(folder.name(), &err) == KVEDGE_OK);
    CHECK(check_folder(folder.name() + "/none", &err) == KVEDGE_E_FILE);
    UnnamedFile nowhere;
    CHECK(!nowhere.open(folder.name() + "/none") && !nowhere.problem().empty());
#if defined(__linux__)
    CHECK(!std::filesystem::exists("/dev/shm") || check_folder("/dev/shm", &err) == KVEDGE_E_UNSUPPORTED);
#endif
    { std::ofstream(folder.path / "file") << "x"; }
    CHECK(check_folder((folder.path / "file").u8string(), &err) == KVEDGE_E_FILE);
    std::filesystem::remove(folder.path / "file");
}

std::shared_ptr<SpillJob> job_of(int32_t n_parts, size_t most) {
    auto job = std::make_shared<SpillJob>();
    for (int32_t p = 0; p < n_parts; p++) {
        job->parts.push_back({ filled(1 + (size_t) below((int32_t) most)), nullptr });
    }
    return job;
}

SpillJob::State ended(const SpillJob & job) {
    while (job.state == SpillJob::State::waiting) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return job.state;
}

void writing() {
    Folder                                 folder;
    std::vector<std::shared_ptr<SpillJob>> jobs;
    Spill                                  spill(folder.name());
    for (int32_t i = 0; i < 20; i++) {
        jobs.push_back(job_of(1 + below(4), 300000));
        jobs.back()->unwanted = i % 5 == 4;
        spill.write(jobs.back());
    }
    for (size_t i = 0; i < jobs.size(); i++) {
        CHECK(ended(*jobs[i]) == (i % 5 == 4 ? SpillJob::State::failed : SpillJob::State::written));
        for (const Spilled & part : jobs[i]->parts) {
            CHECK(i % 5 == 4 ? !part.to : part.to->mapped() && same(*part.from, *part.to));
        }
    }
    Spill elsewhere(folder.name() + "/none");
    auto  lost = job_of(1, 10);
    elsewhere.write(lost);
    CHECK(ended(*lost) == SpillJob::State::failed && !lost->problem.empty());
}

// If the writer ends, jobs that it has not written are marked, so that nobody waits for them.
void ending() {
    Folder folder;
    for (int32_t i = 0; i < 20; i++) {
        std::vector<std::shared_ptr<SpillJob>> jobs;
        {
            Spill spill(folder.name());
            for (int32_t j = 0; j < 5; j++) {
                jobs.push_back(job_of(3, 300000));
                spill.write(jobs.back());
            }
            std::this_thread::sleep_for(std::chrono::microseconds(below(2000)));
        }
        for (const auto & job : jobs) {
            CHECK(job->state == SpillJob::State::dropped || job->state == SpillJob::State::written);
            for (const Spilled & part : job->parts) {
                CHECK(job->state == SpillJob::State::dropped || same(*part.from, *part.to));
            }
        }
    }
}

}  // namespace

int main() {
    files();
    writing();
    ending();
    return failures() == 0 ? 0 : 1;
}
