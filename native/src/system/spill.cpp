#include "system/spill.h"

#include "system/file.h"
#include "system/unnamed_file.h"

#include <algorithm>
#include <new>

namespace kvedge {

constexpr size_t STEP = 8u << 20;  // bytes per write; between writes the thread checks whether the job is still wanted

uint64_t SpillJob::bytes() const {
    uint64_t n = 0;
    for (const Spilled & part : parts) {
        n += part.from->size();
    }
    return n;
}

Spill::Spill(std::string folder) : folder_(std::move(folder)), process_(process_id()) {}

bool Spill::usable() const { return process_ == process_id(); }

void EndSpill::operator()(Spill * spill) const noexcept {
    if (spill->usable()) {
        delete spill;
    }
}

Spill::~Spill() {
    {
        const std::lock_guard<std::mutex> hold(lock_);
        over_ = true;
    }
    more_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
    for (const auto & job : jobs_) {
        job->state = SpillJob::State::dropped;
    }
}

void Spill::write(std::shared_ptr<SpillJob> job) {
    {
        const std::lock_guard<std::mutex> hold(lock_);
        jobs_.push_back(std::move(job));
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { run(); });
        }
    }
    more_.notify_one();
}

bool Spill::write_parts(SpillJob & job) const {
    UnnamedFile file;
    bool        good   = file.open(folder_);
    uint64_t    offset = 0;
    for (Spilled & part : job.parts) {
        for (size_t at = 0; good && at < part.from->size() && !job.unwanted && !over_; at += STEP) {
            good = file.write(offset + at, part.from->data() + at, std::min(STEP, part.from->size() - at));
        }
        Pages pages;
        good = good && !job.unwanted && !over_ && file.map(offset, part.from->size(), pages);
        if (!good) {
            job.problem = file.problem();
            return false;
        }
        part.to = std::make_shared<Pages>(std::move(pages));
        offset += (part.from->size() + UnnamedFile::ALIGNMENT - 1) / UnnamedFile::ALIGNMENT * UnnamedFile::ALIGNMENT;
    }
    return true;
}

void Spill::run() noexcept {
    while (!over_) {
        std::shared_ptr<SpillJob> job;
        {
            std::unique_lock<std::mutex> hold(lock_);
            more_.wait(hold, [this] { return over_ || !jobs_.empty(); });
            if (over_) {
                return;
            }
            job = std::move(jobs_.front());
            jobs_.pop_front();
        }
        bool good = false;
        try {
            good = !job->unwanted && write_parts(*job);
        } catch (const std::bad_alloc &) {  // the job fails with an empty problem, because a text would need memory, too
        }
        job->state = good ? SpillJob::State::written : over_ ? SpillJob::State::dropped : SpillJob::State::failed;
    }
}

}  // namespace kvedge
