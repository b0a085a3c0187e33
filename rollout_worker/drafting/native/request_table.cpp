#include "request_table.hpp"

#include <string>
#include <utility>

namespace das {

RequestTable::Handle RequestTable::insert(std::shared_ptr<Request> request) {
  const std::lock_guard lock(mutex_);
  if (free_slots_.empty()) {
    if (static_cast<Handle>(slots_.size()) == kMaxSlots) throw std::length_error("more than 2^24 requests are open");
    free_slots_.reserve(slots_.size() + 1);  // so that neither this call nor remove() can fail halfway
    slots_.emplace_back();
    free_slots_.push_back(static_cast<Handle>(slots_.size()) - 1);
  }
  const Handle slot = free_slots_.back();
  free_slots_.pop_back();
  const Handle handle = next_serial_++ * kMaxSlots + slot;
  slots_[static_cast<std::size_t>(slot)] = {handle, std::move(request)};
  return handle;
}

const std::shared_ptr<Request>& RequestTable::at(Handle handle) const {
  const auto slot = static_cast<std::size_t>(handle % kMaxSlots);
  if (handle < 0 || slot >= slots_.size() || slots_[slot].handle != handle) {
    throw UnknownRequest("no open request has the handle " + std::to_string(handle) +
                         "; it was closed, or open() of this index did not return it");
  }
  return slots_[slot].request;
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
  slots_[static_cast<std::size_t>(handle % kMaxSlots)] = {};
  free_slots_.push_back(handle % kMaxSlots);
  return request;
}

}  // namespace das
