#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>

namespace kvedge {

// A text for the user that takes no memory, so that it can also tell a lack of memory.
class Reason {
  public:
    // Joins the texts. Cuts a text that is too long.
    void set(std::initializer_list<const char *> texts) noexcept {
        size_t n = 0;
        for (const char * text : texts) {
            const size_t more = std::min(std::strlen(text), sizeof(text_) - 1 - n);
            std::memcpy(text_ + n, text, more);
            n += more;
        }
        text_[n] = '\0';
    }
    void         clear() noexcept { text_[0] = '\0'; }
    bool         empty() const { return text_[0] == '\0'; }
    const char * text() const { return text_; }

  private:
    char text_[500] = "";
};

}  // namespace kvedge
