// The table of open requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <vector>

#include "request.hpp"

namespace das {

struct UnknownRequest : std::out_of_range {
  using std::out_of_range::out_of_range;
};

// Maps handles to requests. A handle consists of a serial number and, in its low bits, the index of the request's
// entry. find() and remove() throw UnknownRequest for a handle that is not open.
class RequestTable {
 public:
  using Handle = std::int64_t;
  static constexpr Handle kNone = -1;  // never the handle of a request

  // Throws std::length_error if too many requests are open.
  Handle insert(std::shared_ptr<Request> request);
  std::shared_ptr<Request> find(Handle handle) const;
  std::vector<std::shared_ptr<Request>> find(std::span<const Handle> handles) const;
  std::shared_ptr<Request> remove(Handle handle);

 private:
  struct Entry {
    Handle handle = kNone;
    std::shared_ptr<Request> request;
  };
  static constexpr Handle kMaxEntries = Handle{1} << 24;

  const std::shared_ptr<Request>& at(Handle handle) const;  // mutex_ is held

  mutable std::mutex mutex_;  // guards the next three; it is held for look-ups only
  std::vector<Entry> entries_;
  std::vector<Handle> free_indices_;
  Handle next_serial_ = 0;
};

}  // namespace das
