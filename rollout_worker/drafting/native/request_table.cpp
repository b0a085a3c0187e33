#include "request_table.hpp"

#include <string>
#include <utility>

namespace das {

RequestTable::Handle RequestTable::insert(std::shared_ptr<Request> request) {
  const std::lock_guard lock(mutex_);
  if (free_indices_.empty()) {
    if (static_cast<Handle>(entries_.size()) == kMaxEntries)
      throw std::length_error("more than 2^24 requests are open");
    free_indices_.reserve(entries_.size() + 1);  // so that neither this call nor remove() can fail halfway
    entries_.emplace_back();
    free_indices_.push_back(static_cast<Handle>(entries_.size()) - 1);
  }
  const Handle index = free_indices_.back();
  free_indices_.pop_back();
  const Handle handle = next_serial_++ * kMaxEntries + index;
  entries_[static_cast<std::size_t>(index)] = {handle, std::move(request)};
  return handle;
}

const std::shared_ptr<Request>& RequestTable::at(Handle handle) const {
  const auto index = static_cast<std::size_t>(handle % kMaxEntries);
  if (handle < 0 || index >= entries_.size() || entries_[index].handle != handle) {
    throw UnknownRequest("no open request has the handle " + std::to_string(handle) +
                         "; it was closed, or open() of this index did not return it");
  }
  return entries_[index].request;
}

std::shared_ptr<Request> RequestTable::find(Handle handle) const {
  const std::lock_guard lock(mutex_);
  return at(handle);
}

std::vector<std::shared_ptr<Request>> RequestTable::find(std::span<const Handle> handles) const {
  std::vector<std::shared_ptr<Request>> requests;
  requests.reserve(handles.size());
  const std::lock_guard lock(mutex_);
  for (const Handle handle : handles) requests.push_back(at(handle));
  return requests;
}

std::shared_ptr<Request> RequestTable::remove(Handle handle) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Request> request = at(handle);
  entries_[static_cast<std::size_t>(handle % kMaxEntries)] = {};
  free_indices_.push_back(handle % kMaxEntries);
  return request;
}

}  // namespace das
